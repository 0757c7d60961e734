"""One process of a group that torchrun starts: `group_member.py MODEL_DIR FILE`.

The first one prints the tokens of some requests as JSON and then makes FILE, at which the others die.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from engine_worker.config import EngineConfig
from engine_worker.engine import build as building
from engine_worker.runner import decoder as decoders
from engine_worker.runner import group
from engine_worker.runner.decoder import TorchDecoder
from tests.engine_worker.driving import Driver, request

ASKED = [request(str(i), [i + 1] * n, 20) for i, n in enumerate((1, 5, 23))]


def main(model_dir: Path, sign: Path) -> None:
    config = EngineConfig(
        model_dir=model_dir, block_size=4, num_kv_blocks=17, max_num_seqs=4, max_num_batched_tokens=16,
        threads=1, kernels="torch", precision="fp32", overlap=True,
    )  # fmt: skip

    class Mortal(TorchDecoder):
        def forward(self, *step):
            if sign.exists() and not group.is_leader():
                os._exit(3)
            return super().forward(*step)

    assert group.join(os.environ, device="cpu")
    decoders.TorchDecoder = Mortal
    if group.is_leader():
        driver = Driver(building.build(config))
        results = driver.run(ASKED)
        assert driver.core.stats().preemptions > 0
        print(json.dumps([results[item.request_id].token_ids for item in ASKED]), flush=True)
        if sign.name == "never":
            driver.core.device.close()
            for thread in threading.enumerate():  # the others are told in it, in its turn
                if thread.name.startswith("weir-device"):
                    thread.join()
        else:
            sign.touch()
            driver.run([request("late", [1, 2, 3], 20)])
    else:
        building.follow(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process whose interpreter is already gone
