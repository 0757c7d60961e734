"""The engine: policy (scheduler, block pool, sampler) and the loop that drives a runner."""

import os

# Before torch loads its thread pool, which reads this once. By default an OpenMP thread that waits for
# the others spins for about a millisecond. A step has hundreds of such waits, and the engine often
# shares its cores with a gateway and a database: on two cores with other work on them, spinning made
# a step five times as long. A short spin (about a tenth of a millisecond), then sleep: on idle cores that was
# the fastest of 0, 1000, 100000 and the default.
os.environ.setdefault("GOMP_SPINCOUNT", "100000")
