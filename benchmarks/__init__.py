import engine_worker.engine  # noqa: F401  (before torch: it says how idle threads wait)
