"""What can go wrong with the quota store.

QuotaError
├── QuotaUnavailable     Redis does not answer, or refuses: 503. Nothing is known of the call's effect;
│                        every call may be repeated with the same reservation id
└── ReservationClosed    the reservation id was settled or released before: ids are never used twice (409)
"""


class QuotaError(Exception):
    pass


class QuotaUnavailable(QuotaError):
    pass


class ReservationClosed(QuotaError):
    def __init__(self, reservation_id: str) -> None:
        super().__init__(f"reservation {reservation_id} was settled or released before")
        self.reservation_id = reservation_id
