"""Exports: their totals are the ledger's, their text no formula, and nobody else's are to be had."""

from __future__ import annotations

import csv
import io
import random
import threading
from datetime import UTC, datetime, timedelta

import openpyxl
import pytest
from django.db import connection
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from inference.models import ExportFile, ExportFormat, ExportState, UsageExport, UsageRecord
from inference.reports import Dimension, Report, Width
from inference.services import exports
from inference.services.exports import TooManyExports, content_of, create_export, write_exports
from inference.services.ledger import adjust_usage, record_usage
from inference.services.report_files import as_xlsx
from tenants.csv_text import as_csv
from tenants.models import ModelPrice, Tenant
from tenants.principal import Scope
from tenants.services import create_project
from tests.factories import TEST, make_key, make_tenant
from tests.inference.ledger_driving import an_event

pytestmark = pytest.mark.django_db(transaction=True)
START = datetime(2026, 9, 1, tzinfo=UTC)
EVIL = '=HYPERLINK("http://x","y")'


@pytest.fixture
def tenant() -> Tenant:
    ModelPrice.objects.create(
        model="a",
        valid_from=START,
        input_microusd_per_mtok=150_001,
        cached_input_microusd_per_mtok=75_000,
        output_microusd_per_mtok=600_003,
    )
    tenant, other = make_tenant(), make_tenant()
    project = create_project(actor=TEST, tenant=tenant, name="@SUM(1+1)")
    keys = [str(make_key(tenant, name=EVIL, project=owner).api_key.public_id) for owner in (project, None)]
    dice = random.Random(7)
    events = [
        an_event(
            str(tenant.public_id),
            f"export-{i}",
            model=dice.choice(["a", "b", "-1+1"]),
            tier=dice.choice(["standard", "batch"]),
            finish_reason=dice.choice(["stop", "length", "cancelled", "error"]),
            key_id=dice.choice([*keys, None]),
            prompt_tokens=dice.randrange(1, 5000),
            completion_tokens=dice.randrange(500),
            created_at_ms=(
                at := int((START + timedelta(minutes=dice.randrange(60 * 24 * 6))).timestamp() * 1000)
            ),
            first_token_at_ms=at + 50,
            finished_at_ms=at + 4000,
        )
        for i in range(300)
    ]
    record_usage(events)
    record_usage(
        [an_event(str(other.public_id), "theirs", model="secret", created_at_ms=events[0].created_at_ms)]
    )
    adjust_usage(actor=TEST, tenant=tenant, cost_microusd=-77, reason="test")
    return tenant


def a_report(tenant: Tenant, **given) -> Report:
    return Report(**{"tenant_id": tenant.pk, "since": START, "until": START + timedelta(days=365), **given})


def exported(tenant: Tenant, format: ExportFormat, **given) -> tuple[UsageExport, list[dict]]:
    export = create_export(actor=TEST, tenant=tenant, report=a_report(tenant, **given), format=format)
    assert write_exports() == 1
    export.refresh_from_db()
    assert export.state == ExportState.DONE, export.error
    return export, read(content_of(export), format)


def read(content: bytes, format: ExportFormat) -> list[dict]:
    if format == ExportFormat.CSV:
        return list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline="")))
    header, *rows = openpyxl.load_workbook(io.BytesIO(content), read_only=True).active.iter_rows(
        values_only=True
    )
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.parametrize("format", ExportFormat)
@pytest.mark.parametrize("width", Width)
def test_totals_are_the_ledgers_to_the_micro_unit(tenant, format, width, monkeypatch):
    """FAULTS 64."""
    monkeypatch.setattr(exports, "_PAGE", 7)
    records = list(UsageRecord.objects.for_tenant(tenant))
    cost = sum(record.cost_microusd for record in records)
    for group_by in ((), (Dimension.KEY, Dimension.MODEL), tuple(Dimension)):
        export, rows = exported(tenant, format, width=width, group_by=group_by)
        assert sum(int(row["total_microusd"]) for row in rows) == cost - 77 == export.total_microusd
        assert sum(int(row["cost_microusd"]) for row in rows) == cost
        assert sum(int(row["requests"]) for row in rows) == len(records)
        assert sum(int(row["input_tokens"]) for row in rows) == sum(r.prompt_tokens for r in records)
        assert sum(int(row["output_tokens"]) for row in rows) == sum(r.completion_tokens for r in records)
        assert len(rows) == export.rows
        assert "secret" not in str(rows)


def test_no_text_is_a_formula(tenant):
    groups = (Dimension.PROJECT, Dimension.KEY, Dimension.MODEL)
    _, rows = exported(tenant, ExportFormat.CSV, group_by=groups)
    assert {row["key_name"] for row in rows} == {"", f"'{EVIL}"}
    assert {row["project_name"] for row in rows} == {"", "'@SUM(1+1)"}
    assert "'-1+1" in {row["model"] for row in rows}
    export, rows = exported(tenant, ExportFormat.XLSX, group_by=groups)
    assert EVIL in {row["key_name"] for row in rows}
    sheet = openpyxl.load_workbook(io.BytesIO(content_of(export))).active
    assert {cell.data_type for row in sheet.iter_rows() for cell in row} <= {"s", "n"}


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
                st.sampled_from("=+-@\t\r\n").map(lambda first: f"{first}1"),
            ),
            st.integers(-(2**62), 2**62),
        ),
        max_size=8,
    )
)
def test_whatever_the_text_and_amount_the_file_says_it_and_runs_nothing(rows):
    found = list(csv.reader(io.StringIO(as_csv(["text", "n"], rows).decode("utf-8-sig"), newline="")))[1:]
    assert [text.removeprefix("'") for text, _ in found] == [text.removeprefix("'") for text, _ in rows]
    assert not any(text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for text, _ in found)
    assert sum(int(n) for _, n in found) == sum(n for _, n in rows)
    sheet = openpyxl.load_workbook(io.BytesIO(as_xlsx(["text", "n"], rows))).active
    cells = list(sheet.iter_rows(min_row=2))
    assert sum(int(row[1].value) for row in cells) == sum(n for _, n in rows)
    assert {cell.data_type for row in cells for cell in row} <= {"s", "n"}


def test_one_is_written_once_however_many_write(tenant):
    for _ in range(4):
        create_export(actor=TEST, tenant=tenant, report=a_report(tenant), format=ExportFormat.CSV)
    barrier, written = threading.Barrier(3, timeout=30), []

    def work() -> None:
        try:
            barrier.wait()
            written.append(write_exports())
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(written) == 4
    assert ExportFile.objects.count() == 4


def test_what_a_dead_task_left_is_written_by_the_next_and_given_up_at_last(tenant):
    export = create_export(actor=TEST, tenant=tenant, report=a_report(tenant), format=ExportFormat.CSV)
    rows = UsageExport.objects.filter(tenant=tenant)
    long_ago = datetime.now(UTC) - timedelta(hours=1)
    rows.update(state=ExportState.RUNNING, started_at=datetime.now(UTC), attempts=1)
    assert write_exports() == 0
    rows.update(started_at=long_ago)
    assert write_exports() == 1
    export.refresh_from_db()
    assert export.state == ExportState.DONE
    rows.update(state=ExportState.RUNNING, started_at=long_ago, finished_at=None, attempts=3)
    write_exports()
    export.refresh_from_db()
    assert (export.state, bool(export.error)) == (ExportState.FAILED, True)


def test_too_long_a_report_says_so(tenant, monkeypatch):
    monkeypatch.setattr(exports, "_ROWS_MAX", 2)
    export = create_export(actor=TEST, tenant=tenant, report=a_report(tenant), format=ExportFormat.XLSX)
    write_exports()
    export.refresh_from_db()
    assert export.state == ExportState.FAILED
    assert "shorter span" in export.error
    assert content_of(export) is None


def test_so_many_wait_and_no_more(tenant):
    for _ in range(5):
        create_export(actor=TEST, tenant=tenant, report=a_report(tenant), format=ExportFormat.CSV)
    with pytest.raises(TooManyExports):
        create_export(actor=TEST, tenant=tenant, report=a_report(tenant), format=ExportFormat.CSV)
    write_exports()
    create_export(actor=TEST, tenant=tenant, report=a_report(tenant), format=ExportFormat.CSV)


def test_over_http(http, tenant):
    bearer = {"Authorization": f"Bearer {make_key(tenant, scopes=[Scope.USAGE_READ]).secret}"}
    stranger = {"Authorization": f"Bearer {make_key(scopes=[Scope.ADMIN]).secret}"}
    asked = {
        "start": "2026-09-01",
        "end": "2027-01-01",
        "group_by": ["model"],
        "model": ["a"],
        "format": "csv",
    }
    made = http.post("usage/exports", json=asked, headers=bearer)
    assert made.status_code == 202
    path = f"usage/exports/{made.json()['id']}"
    assert made.json()["state"] == "queued"
    assert http.get(f"{path}/content", headers=bearer).json()["error"]["code"] == "export_not_ready"
    write_exports()
    told = http.get(path, headers=bearer).json()
    assert told["state"] == "done"
    file = http.get(f"{path}/content", headers=bearer)
    assert file.headers["content-type"] == "text/csv; charset=utf-8"
    assert file.headers["content-disposition"] == f'attachment; filename="{told["file_name"]}"'
    rows = read(file.content, ExportFormat.CSV)
    assert {row["model"] for row in rows} == {"a"}
    assert sum(int(row["total_microusd"]) for row in rows) == told["total_microusd"]
    assert [each["id"] for each in http.get("usage/exports", headers=bearer).json()["data"]] == [told["id"]]
    assert http.get("usage/exports", headers=stranger).json()["data"] == []
    for theirs in (path, f"{path}/content"):
        assert http.get(theirs, headers=stranger).json()["error"]["code"] == "export_not_found"
    UsageExport.objects.filter(tenant=tenant).update(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert http.get(f"{path}/content", headers=bearer).status_code == 404
    write_exports()
    assert not UsageExport.objects.filter(tenant=tenant).exists()
    assert not ExportFile.objects.exists()


@pytest.mark.parametrize(
    ("given", "param"),
    [({"start": "yesterday"}, "start"), ({"group_by": ["user"]}, "group_by"), ({"key": ["mine"]}, "key")],
)
def test_what_will_not_do_is_named(http, given, param):
    bearer = {"Authorization": f"Bearer {make_key(scopes=[Scope.USAGE_READ]).secret}"}
    answer = http.post("usage/exports", json=given, headers=bearer)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert http.post("usage/exports", json={"format": "pdf"}, headers=bearer).status_code == 400
