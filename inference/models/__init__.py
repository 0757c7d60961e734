from inference.models.usage import ParkedUsageEvent, UsageRecord

__all__ = ["ParkedUsageEvent", "UsageRecord"]
