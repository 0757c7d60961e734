"""A request that is taken up by another worker, cut at each of its tokens: what follows is what would have followed."""

from __future__ import annotations

import pytest

from tests.engine_worker.driving import Driver, request
from tests.engine_worker.engine.test_grammar import PERSON
from tests.engine_worker.engine.test_speculation import LETTERS, REPEATING, WAYS

RESUMED_WAYS = WAYS | {
    "grammar": {"grammar": PERSON, "temperature": 1.0, "seed": 2, "ignore_eos": False},
    "stop that is passed over": {
        "stop": ("aa",), "min_tokens": 25, "temperature": 1.0, "seed": 8, "logit_bias": LETTERS,
    },
    "long stop": {"stop": ("abcabcabcabc", "ccbb"), "temperature": 1.0, "seed": 9, "logit_bias": LETTERS},
}  # fmt: skip


@pytest.mark.parametrize("speculative", [0, 4])
@pytest.mark.parametrize("way", RESUMED_WAYS)
def test_cut_anywhere_it_goes_on_as_it_would_have(build_tiny, way, speculative):
    """Tokens, text (what a stop string held back included), log probabilities and the end."""
    sampling = RESUMED_WAYS[way]
    built = build_tiny(speculative_tokens=speculative)
    whole = Driver(built).run([request("whole", REPEATING, 60, **sampling)])["whole"]
    assert len(whole.token_ids) > 2
    # Only where the worker's log may have been cut: after what a step told.
    cuts = [piece.seq + len(piece.token_ids) for piece in whole.pieces if piece.finish is None]
    told = {
        cut: "".join(p.text for p in whole.pieces if p.seq + len(p.token_ids) <= cut and p.finish is None)
        for cut in cuts
    }
    results = Driver(built).run(
        request(str(cut), REPEATING, 60, resumed_token_ids=whole.token_ids[:cut], **sampling) for cut in cuts
    )
    expected = [entry for piece in whole.pieces for entry in piece.logprobs or ()]
    for cut in cuts:
        rest = results[str(cut)]
        assert rest.token_ids == whole.token_ids[cut:]
        assert told[cut] + rest.text == whole.text
        assert (rest.finish.reason, rest.finish.stop_reason) == (
            whole.finish.reason,
            whole.finish.stop_reason,
        )
        assert rest.finish.completion_tokens == len(whole.token_ids)
        scores = [entry for piece in rest.pieces for entry in piece.logprobs or ()]
        assert len(scores) == len(rest.token_ids) if "logprobs" in sampling else not scores
        for one, other in zip(scores, expected[cut:], strict=bool(scores)):
            assert one.chosen.token_id == other.chosen.token_id
            assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)
