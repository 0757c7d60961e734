from inference.models.adjustment import UsageAdjustment
from inference.models.alert import Alert, AlertKind
from inference.models.batch import Batch, BatchResult, BatchStatus, StoredFile
from inference.models.conversation import Conversation, Exchange
from inference.models.export import ExportFile, ExportFormat, ExportState, UsageExport
from inference.models.histogram import (
    LATENCY_STEP,
    HistogramField,
    LatencyMetric,
    bounds,
    histogram_sums,
    percentiles_ms,
)
from inference.models.idempotency import IdempotentRequest
from inference.models.operation import Announcement, Maintenance, ModelSetting
from inference.models.response import StoredResponse
from inference.models.rollup import UsageDay, UsageDayOfKey, UsageDayTotal, UsageHour, UsageHourTotal
from inference.models.usage import ParkedUsageEvent, RecordedRequest, UsageRecord
from inference.models.webhook import DeliveryState, WebhookDelivery, WebhookEndpoint
from inference.models.worker_command import CommandAction, CommandState, WorkerCommand

__all__ = [
    "LATENCY_STEP",
    "Alert",
    "AlertKind",
    "Announcement",
    "Batch",
    "BatchResult",
    "BatchStatus",
    "CommandAction",
    "CommandState",
    "Conversation",
    "DeliveryState",
    "Exchange",
    "ExportFile",
    "ExportFormat",
    "ExportState",
    "HistogramField",
    "IdempotentRequest",
    "LatencyMetric",
    "Maintenance",
    "ModelSetting",
    "ParkedUsageEvent",
    "RecordedRequest",
    "StoredFile",
    "StoredResponse",
    "UsageAdjustment",
    "UsageDay",
    "UsageDayOfKey",
    "UsageDayTotal",
    "UsageExport",
    "UsageHour",
    "UsageHourTotal",
    "UsageRecord",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WorkerCommand",
    "bounds",
    "histogram_sums",
    "percentiles_ms",
]
