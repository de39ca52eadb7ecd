"""Output that goes through the model once more, because its worker died, leaves the same bits as the first time."""

import pytest

from pdq.core.messages import Sampling
from tests.tiny_models import FAMILIES
from tests.unit.torch.moves import MakeEngine, generate, handed_over_seat, ids, prompt, work

WILD = Sampling(
    temperature=1.3, seed=11, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2, logprobs=3
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("at", [1, 5, 23, 39])
async def test_prefilled_again_with_its_output_a_sequence_goes_on_with_the_same_bits(
    make_engine: MakeEngine, family: str, at: int
) -> None:
    engine = make_engine(family)
    tokens = prompt(45)  # chunks of 32: prompt and output meet inside one, and the output goes over several
    expected = await generate(engine, work(tokens, WILD, 40))
    again = work([*tokens, *ids(expected[:at])], WILD, 40 - at, resumed=at)
    assert await generate(engine, again) == expected[at:]


@pytest.mark.parametrize("at", [1, 5, 39])
async def test_replayed_behind_kv_that_was_kept_a_sequence_goes_on_with_the_same_bits(
    make_engine: MakeEngine, at: int
) -> None:
    source, sink = make_engine(), make_engine()
    asked = work(prompt(45), WILD, 40)
    expected = await generate(source, asked)
    seat, first = await handed_over_seat(source, sink, asked)
    assert first == expected[0]
    seat.join(first, ids(expected[1:at]))
    drawn = []
    while len(drawn) < 40 - at:
        drawn += [token for _, token in (await sink.step()).drawn]
    seat.leave()
    assert drawn == expected[at:]
