"""One process of a group that torchrun starts: `group_member.py FILE MODEL_DIR...`.

The first one prints the tokens of some requests to each model as JSON and then makes FILE, at which the others die.
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


def main(sign: Path, model_dirs: list[Path]) -> None:
    class Mortal(TorchDecoder):
        def forward(self, *step):
            if sign.exists() and not group.is_leader():
                os._exit(3)
            return super().forward(*step)

    assert group.join(os.environ, device="cpu")
    decoders.TorchDecoder = Mortal
    for model_dir in model_dirs:
        config = EngineConfig(
            model_dir=model_dir, block_size=4, num_kv_blocks=17, max_num_seqs=4, max_num_batched_tokens=16,
            threads=1, kernels="torch", precision="fp32", overlap=True,
        )  # fmt: skip
        if group.is_leader():
            lead(config, sign)
        else:
            building.follow(config)


def lead(config: EngineConfig, sign: Path) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(each) for each in sys.argv[2:]])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process whose interpreter is already gone
