"""What operators told workers to serve, and what became of it."""

import uuid_utils.compat
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('inference', '0019_settings_of_conversations'),
    ]

    operations = [
        migrations.CreateModel(
            name='WorkerCommand',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('public_id', models.UUIDField(default=uuid_utils.compat.uuid7, editable=False, unique=True)),
                ('worker_id', models.CharField(max_length=200)),
                ('action', models.CharField(choices=[('load', 'Load'), ('unload', 'Unload')], max_length=10)),
                ('model', models.CharField(max_length=200, verbose_name='name for clients')),
                ('source', models.CharField(blank=True, max_length=1000, verbose_name="where it is, on the worker's machine")),
                ('state', models.CharField(choices=[('open', 'Open'), ('done', 'Done'), ('refused', 'Refused'), ('lost', 'Lost')], default='open', max_length=10)),
                ('refusal', models.CharField(blank=True, max_length=40)),
                ('outcome', models.TextField(blank=True)),
                ('models_before', models.JSONField(blank=True, default=list)),
                ('models_after', models.JSONField(blank=True, null=True)),
                ('asked_by', models.CharField(max_length=254)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('ended_at', models.DateTimeField(blank=True, null=True)),
            ],
            options={
                'ordering': ['-id'],
                'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('worker_id', ''), _negated=True), models.Q(('model', ''), _negated=True)), name='worker_command_names_worker_and_model'), models.CheckConstraint(condition=models.Q(('action', 'load'), ('source', ''), _connector='XOR'), name='worker_command_loads_from_somewhere'), models.CheckConstraint(condition=models.Q(('state__in', ['open', 'done', 'refused', 'lost'])), name='worker_command_state_is_known'), models.CheckConstraint(condition=models.Q(('state', 'open'), ('ended_at__isnull', False), _connector='XOR'), name='worker_command_ends_once'), models.UniqueConstraint(condition=models.Q(('state', 'open')), fields=('worker_id', 'model'), name='worker_command_one_at_a_time')],
            },
        ),
    ]
