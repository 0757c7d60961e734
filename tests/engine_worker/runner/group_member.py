"""One process of a group that torchrun starts: `group_member.py MODEL_DIR FILE`.

The first one prints the tokens of some requests as JSON and then makes FILE, at which the others die.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine_worker.config import EngineConfig
from engine_worker.engine import build as building
from engine_worker.runner import group
from engine_worker.runner.decoder import TorchDecoder
from tests.engine_worker.driving import Driver, request

MODEL_DIR, SIGN = Path(sys.argv[1]), Path(sys.argv[-1])
CONFIG = EngineConfig(
    model_dir=MODEL_DIR, block_size=4, num_kv_blocks=17, max_num_seqs=4, max_num_batched_tokens=16, threads=1,
    kernels="torch", precision="fp32", overlap=True,
)  # fmt: skip
ASKED = [request(str(i), [i + 1] * n, 20) for i, n in enumerate((1, 5, 23))]


class Mortal(TorchDecoder):
    def forward(self, *step):
        if SIGN.exists() and not group.is_leader():
            os._exit(3)
        return super().forward(*step)


if __name__ == "__main__":
    assert group.join(os.environ, device="cpu")
    import engine_worker.runner.decoder as decoders

    decoders.TorchDecoder = Mortal
    if group.is_leader():
        driver = Driver(building.build(CONFIG))
        results = driver.run(ASKED)
        assert driver.core.stats().preemptions > 0
        print(json.dumps([results[item.request_id].token_ids for item in ASKED]), flush=True)
        if SIGN.name == "never":
            driver.core.device.close()
        else:
            SIGN.touch()
            driver.run([request("late", [1, 2, 3], 20)])
    else:
        building.follow(CONFIG)
