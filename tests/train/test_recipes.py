"""What a plan for cards chooses: rules of thumb that are published, and properties that no numbers may break."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="the control venv has it")
from hypothesis import given, settings
from hypothesis import strategies as st

from refit.errors import BadInput
from refit.spec import Train
from trainer import fleet as described
from trainer import recipes
from trainer.fleet import Cards
from trainer.memory import Layout, Shape, at_start, bytes_per_rank, largest_micro_batch, total, usable
from trainer.packs import Packs
from trainer.proposal import propose
from trainer.remedies import leanest

GIB = 1 << 30
TRAIN = Train(base="cache://models/any", max_steps=5000)
PACKS = Packs.assumed(2048)
LLAMA_7B = Shape(
    parameters=6_738_415_616, layers=32, hidden=4096, heads=32, queries=4096, keys=4096, inner=11008, gated=True,
    vocabulary=32000, ends=262_144_000, adapter=2_498_560, widest=8,
)  # fmt: skip
LLAMA_13B = replace(
    LLAMA_7B, parameters=13_015_864_320, layers=40, hidden=5120, heads=40, queries=5120, keys=5120, inner=13824,
    ends=327_680_000, adapter=3_911_680,
)  # fmt: skip


def with_steps(steps: int) -> Train:
    return TRAIN.model_copy(update={"max_steps": steps})


def on(count: int, memory: int = 80, **more: float) -> Cards:
    return Cards(count=count, memory=memory * GIB, flops=989e12, **more)  # type: ignore[arg-type]


shapes = st.builds(
    lambda layers, heads, wide, grouped, factor, vocabulary, gated, tied: _shape(
        layers, heads * grouped, wide, heads, factor, vocabulary, gated, tied
    ),
    st.integers(1, 100), st.integers(1, 16), st.sampled_from([32, 64, 128]), st.sampled_from([1, 2, 4, 8]),
    st.floats(1, 6), st.integers(256, 260_000), st.booleans(), st.booleans(),
)  # fmt: skip


def _shape(
    layers: int, heads: int, wide: int, key_heads: int, factor: float, vocabulary: int, gated: bool, tied: bool
) -> Shape:
    """A decoder as transformers would build it."""
    hidden, keys = heads * wide, key_heads * wide
    inner = int(hidden * factor)
    matrices = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    matrices += [(hidden, inner)] * (3 if gated else 2)
    ends = vocabulary * hidden * (1 if tied else 2)
    return Shape(
        parameters=layers * sum(a * b for a, b in matrices) + ends, layers=layers, hidden=hidden, heads=heads,
        queries=hidden, keys=keys, inner=inner, gated=gated, vocabulary=vocabulary, ends=ends,
        adapter=layers * sum(a + b for a, b in matrices),
    )  # fmt: skip


layouts = st.builds(
    Layout, method=st.sampled_from(["full", "lora"]), lora_rank=st.integers(1, 256), ranks=st.integers(1, 512),
    stage=st.integers(0, 3), checkpointing=st.booleans(), micro_batch=st.integers(0, 64),
)  # fmt: skip
lengths = st.sampled_from([128, 512, 2048, 8192])
memories = st.integers(1, 200)
methods = st.sampled_from(["full", "lora"])


# ------------------------------------------------------------------------------------------------ published numbers


@pytest.mark.parametrize(("layout", "bytes_a_parameter"), [
    # Held are float32 weights, gradients and moments, and bfloat16 copies of the weights; at stages 1 and 2 ZeRO's too.
    (Layout(method="full", lora_rank=16, ranks=8, stage=0), 4 + 4 + 8 + 2),
    (Layout(method="full", lora_rank=16, ranks=8, stage=1), 4 + 4 + 12 / 8 + 2),
    (Layout(method="full", lora_rank=16, ranks=8, stage=2), 4 + 4 / 8 + 12 / 8 + 2),
    (Layout(method="full", lora_rank=16, ranks=8, stage=3), 4 / 8 + 4 / 8 + 8 / 8 + 2),
    (Layout(method="full", lora_rank=16, ranks=8, stage=2, together=2), (4 + 4 / 4 + 12 / 4 + 2) * 0.52),  # ends: 4 %
    (Layout(method="lora", lora_rank=16, ranks=8, stage=0), 2 + 18 * 0.006),  # adapters are 0.6 % of the parameters
    (Layout(method="lora", lora_rank=16, ranks=8, stage=3), 4 / 8 + 2 + 4 * 0.006),
    (Layout(method="qlora", lora_rank=16, ranks=1, stage=0), 4.127 / 8 + 0.039 * (6 - 0.52) + 18 * 0.006),
])  # fmt: skip
def test_a_card_holds_what_learns_in_float32_and_a_copy_to_compute_with(
    layout: Layout, bytes_a_parameter: float
) -> None:
    kinds = bytes_per_rank(LLAMA_7B, layout, length=2048, targets=512)
    states = kinds["weights"] + kinds["copies"] + kinds["gradients"] + kinds["optimizer"]
    assert states / LLAMA_7B.parameters == pytest.approx(bytes_a_parameter, rel=0.05)


def test_shared_gradients_and_optimizer_let_a_7b_train_fully_on_eight_cards() -> None:
    """Published mixed precision, 2 bytes of weights and of gradients, would say stage 1; this trainer has no room."""
    plan = propose(TRAIN, LLAMA_7B, PACKS, on(8), asked="full")
    assert (plan["fits"], plan["zero_stage"], plan["gradient_checkpointing"]) == (True, 2, False)
    assert sum(plan["bytes_per_rank"].values()) <= usable(80 * GIB)
    assert plan["accumulation"] % 8 == 0
    assert plan["learning_rate"] == pytest.approx(2e-5), "Llama 2-Chat"
    assert plan["micro_batch"] * plan["accumulation"] * 2048 == pytest.approx(64 * 4096, rel=1 / 3)
    assert plan["flops"] == pytest.approx(6 * LLAMA_7B.parameters * plan["tokens"], rel=0.1)


def test_a_model_that_is_whole_on_a_card_before_zero_3_shares_it_out_must_fit_there() -> None:
    """On 64 cards what a step takes of each is 48 GiB, and there is no way to it."""
    layout = leanest(Layout(method="full", lora_rank=16, ranks=64))
    large = replace(LLAMA_13B, parameters=20_500_000_000)
    step = sum(bytes_per_rank(large, layout, length=PACKS.length, targets=PACKS.targets).values())
    assert step < usable(80 * GIB) < at_start(large, layout) == pytest.approx(4 * 20.5e9, rel=0.05)
    plan = propose(TRAIN, large, PACKS, on(64), asked="full")
    assert not plan["fits"]
    assert "in float32 before it is shared out" in plan["why"][-1]
    assert "what would: " in plan["why"][-1]
    assert "cards like these" not in plan["why"][-1], "more of them are no help"
    assert "2 cards that hold each matrix together (train.tensor_parallel 2, at ZeRO 2)" in plan["why"][-1]
    cut = replace(layout, stage=2, together=2)
    assert total(large, cut, length=PACKS.length, targets=PACKS.targets) <= usable(80 * GIB)


def test_lora_of_a_7b_fits_on_a_card_of_24_gib() -> None:
    plan = propose(TRAIN, LLAMA_7B, PACKS, on(1, 24), asked="lora")
    assert (plan["fits"], plan["zero_stage"]) == (True, 0)
    assert plan["learning_rate"] == pytest.approx(2e-4), "QLoRA, table 9"
    assert plan["trainable"] == 39_976_960


def test_a_13b_does_not_fit_on_one_card_and_what_would_is_said_and_true() -> None:
    plan = propose(TRAIN, LLAMA_13B, PACKS, on(1), asked="full")
    assert not plan["fits"]
    said = plan["why"][-1]
    assert said.startswith("this does not fit, because full training of 13.0 billion parameters takes")
    assert "what would: 5 cards like these, at ZeRO stage 3; LoRA on these" in said
    assert "QLoRA" in said
    assert "cards of 234 GiB" in said
    for changed in (on(4), on(1, 233)):
        assert not propose(TRAIN, LLAMA_13B, PACKS, changed, asked="full")["fits"], "five are the fewest"
    for changed in (on(5), on(1, 234)):
        assert propose(TRAIN, LLAMA_13B, PACKS, changed, asked="full")["fits"]
    assert propose(TRAIN, LLAMA_13B, PACKS, on(1), asked="lora")["fits"]


def test_only_four_bit_is_named_where_only_four_bit_fits() -> None:
    said = propose(TRAIN, LLAMA_13B, PACKS, on(1, 24), asked="full")["why"][-1]
    assert "QLoRA" in said
    assert "--method lora" not in said
    assert propose(TRAIN, LLAMA_13B, PACKS, on(1, 24), asked="qlora")["fits"], "and asked for, it is planned"
    tight = propose(TRAIN, LLAMA_13B, PACKS, on(4, 8), asked="qlora")
    assert (tight["fits"], tight["zero_stage"]) == (False, 2), "4-bit weights are not shared out"


def train_of(plan: dict[str, Any]) -> Train:
    """The spec that a plan's `sets` make."""
    from refit.pipeline import merge, parse_set

    document: dict[str, Any] = {"train": {"base": "cache://models/any"}}
    for text in plan["sets"]:
        document = merge(document, parse_set(text))
    return Train.model_validate(document["train"])


def test_a_13b_trains_fully_on_eight_cards_with_everything_shared() -> None:
    plan = propose(TRAIN, LLAMA_13B, PACKS, on(8), asked="full")
    assert (plan["fits"], plan["zero_stage"], plan["tensor_parallel"]) == (True, 3, 1)
    assert sum(plan["bytes_per_rank"].values()) <= usable(80 * GIB)
    assert plan["pipeline_parallel"] == 1, "its place is in the plan; nobody does it yet"


def test_matrices_are_held_together_where_that_goes_with_the_rest_of_the_recipe() -> None:
    plan = propose(TRAIN, LLAMA_13B, PACKS, on(8, 139), asked="full")
    train = train_of(plan)
    assert (plan["fits"], train.tensor_parallel, train.zero_stage) == (True, 2, plan["zero_stage"])
    assert train.zero_stage in (1, 2)
    assert train.accumulation % 4 == 0, "of four groups"
    assert sum(plan["bytes_per_rank"].values()) <= usable(139 * GIB)
    for changed, cards, goal, method in (
        (replace(LLAMA_13B, widest=1), on(8, 139), "sft", "full"),  # nobody has a plan of its matrices
        (LLAMA_13B, on(9, 139), "sft", "full"),  # nodes of three are not to be divided by two
        (LLAMA_13B, on(8, 139), "dpo", "full"),
        (LLAMA_13B, on(8, 139), "sft", "lora"),
        (LLAMA_13B, on(8), "sft", "full"),  # at ZeRO 3
        (LLAMA_7B, on(8, 139), "sft", "full"),
    ):
        other = propose(TRAIN, changed, PACKS, cards, goal=goal, asked=method)
        assert (other["fits"], train_of(other).tensor_parallel) == (True, 1), (cards, goal, method)


def test_layers_are_computed_again_where_activations_do_not_fit() -> None:
    tight, roomy = (propose(TRAIN, LLAMA_7B, Packs.assumed(8192), on(8, size), asked="full") for size in (80, 139))
    assert (tight["fits"], train_of(tight).checkpoint_activations) == (True, True)
    assert (roomy["fits"], train_of(roomy).checkpoint_activations) == (True, False)


def test_stage_0_is_enough_for_a_small_model() -> None:
    plan = propose(TRAIN, _shape(24, 14, 64, 2, 5.43, 151_936, True, True), PACKS, on(1))
    assert 0.4e9 < plan["parameters"] < 0.6e9
    assert (plan["fits"], plan["zero_stage"], plan["method"]) == (True, 0, "lora")


# ------------------------------------------------------------------------------------------------ single choices


def test_an_adapter_is_chosen_as_long_as_it_can_hold_the_data() -> None:
    roomy = {"full": True, "lora": True, "qlora": True}
    choose = recipes.choose_method
    assert choose("sft", roomy, asked=None, adapter=1000, learnt=2000).value == "lora"
    assert choose("sft", roomy, asked=None, adapter=1000, learnt=2001).value == "full"
    assert choose("sft", {**roomy, "full": False}, asked=None, adapter=1000, learnt=2001).value == "lora"
    assert choose("pretrain", {**roomy, "full": False}, asked=None, adapter=1000, learnt=1).value == "full"
    assert choose("pretrain", roomy, asked="lora", adapter=1, learnt=9).value == "lora"


def test_pretraining_takes_the_rate_and_the_batch_of_gpt_3() -> None:
    plan = propose(with_steps(10**6), LLAMA_7B, Packs.assumed(2048, learnt=1.0), on(64), goal="pretrain")
    assert (plan["method"], plan["learning_rate"]) == ("full", 1.2e-4)
    assert plan["micro_batch"] * plan["accumulation"] * 2048 == pytest.approx(2e6, rel=0.1)


def test_a_small_training_keeps_a_hundred_steps_unless_there_are_more_cards_than_packs() -> None:
    few = recipes.choose_batch("sft", "lora", parameters=10**9, length=512, packs=1000, ranks=1)
    assert few.value == 10
    assert recipes.choose_batch("sft", "lora", parameters=10**9, length=512, packs=1000, ranks=16).value == 16


def test_saving_follows_young_and_never_risks_more_than_the_spec_allows() -> None:
    on_many = recipes.choose_checkpoint_minutes(94 * 10**9, ranks=16_384, most=30)
    failure = 54 * 24 * 3600 / 466
    assert on_many.value == pytest.approx((2 * 94 * failure) ** 0.5 / 60, rel=0.01)
    assert recipes.choose_checkpoint_minutes(94 * 10**9, ranks=8, most=30).value == 30


def test_the_sets_are_a_valid_recipe() -> None:
    for count in (1, 8, 12, 13, 64):
        plan = propose(TRAIN, LLAMA_7B, PACKS, on(count))
        train = train_of(plan)
        assert train.nodes * train.gpus_per_node == train.ranks == count
        assert (train.zero_stage, train.learning_rate) == (plan["zero_stage"], pytest.approx(plan["learning_rate"]))
        assert (train.micro_batch, train.accumulation) == (plan["micro_batch"], plan["accumulation"])


def test_every_choice_has_a_reason_and_cost_follows_the_price() -> None:
    plan = propose(TRAIN, LLAMA_7B, PACKS, on(8, price=2.0))
    assert set(plan["reasons"]) == set(plan["recipe"])
    assert all(plan["reasons"].values())
    assert set(plan["bytes_why"]) == set(plan["bytes_per_rank"])
    assert plan["cost"] == pytest.approx(2.0 * 8 * plan["hours"])
    assert propose(TRAIN, LLAMA_7B, PACKS, on(8))["cost"] is None


# ------------------------------------------------------------------------------------------------ properties


@given(shapes, layouts, lengths)
def test_a_higher_stage_never_needs_more_of_a_rank(shape: Shape, layout: Layout, length: int) -> None:
    """Where there is somebody to share with. Frozen weights would be in float32 at stage 3, and are not shared out."""
    stages = range(4 if layout.method == "full" else 3)
    layout = replace(layout, ranks=max(2, layout.ranks))
    needs = [total(shape, replace(layout, stage=stage), length=length, targets=length / 4) for stage in stages]
    assert all(higher <= lower + 3 for lower, higher in pairwise(needs)), "3 for rounding"


@given(shapes, layouts, lengths, memories)
def test_the_micro_batch_is_the_largest_that_fits(shape: Shape, layout: Layout, length: int, memory: int) -> None:
    room = largest_micro_batch(shape, layout, length=length, targets=length / 4, memory=memory * GIB)
    fits = [
        total(shape, replace(layout, micro_batch=packs), length=length, targets=length / 4) <= usable(memory * GIB)
        for packs in (room, room + 1)
    ]
    assert fits == [True, False] if room else not fits[1]


@settings(max_examples=60)
@given(shapes, st.integers(1, 256), memories, memories, methods)
def test_more_memory_never_makes_it_not_fit(shape: Shape, count: int, less: int, more: int, method: str) -> None:
    less, more = sorted((less, more))
    tight, roomy = (propose(TRAIN, shape, PACKS, on(count, memory), asked=method) for memory in (less, more))
    assert roomy["fits"] or not tight["fits"]
    if tight["fits"]:
        assert roomy["hours"] <= tight["hours"] * (1 + 1e-9)


@settings(max_examples=60)
@given(shapes, st.integers(1, 256), st.integers(1, 256), memories, methods)
def test_more_cards_never_take_more_hours(shape: Shape, few: int, many: int, memory: int, method: str) -> None:
    few, many = sorted((few, many))
    small, large = (propose(TRAIN, shape, PACKS, on(count, memory), asked=method) for count in (few, many))
    assert large["fits"] or not small["fits"]
    if small["fits"]:
        assert large["hours"] <= small["hours"] * (1 + 1e-9)


@settings(max_examples=60)
@given(shapes, st.integers(1, 256), memories, methods)
def test_the_stage_is_the_lowest_that_fits_and_the_leanest_fits_where_any_does(
    shape: Shape, count: int, memory: int, method: str
) -> None:
    plan = propose(TRAIN, shape, PACKS, on(count, memory), asked=method)
    layout = Layout(
        method=method, lora_rank=16, ranks=count, checkpointing=plan["gradient_checkpointing"], stage=plan["zero_stage"]
    )

    def room(layout: Layout) -> int:
        return largest_micro_batch(shape, layout, length=PACKS.length, targets=PACKS.targets, memory=memory * GIB)

    assert plan["fits"] == (room(layout) > 0) == (room(leanest(layout)) > 0)
    if plan["fits"]:
        assert not any(room(replace(layout, stage=stage)) for stage in range(plan["zero_stage"]))
        assert sum(plan["bytes_per_rank"].values()) <= usable(memory * GIB)
    assert plan["accumulation"] % count == 0


# ------------------------------------------------------------------------------------------------ the options


def options(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    described.add_options(parser)
    return parser.parse_args(argv)


def test_cards_are_named_or_described() -> None:
    assert described.cards_of(options()) is None
    assert described.cards_of(options("--gpus", "2")) == Cards(count=2, memory=79 * GIB, flops=989e12)
    named = described.cards_of(options("--gpus", "1", "--gpu-flops", "H200"))
    assert (named.memory, named.flops) == (139 * GIB, 989e12)
    given_by_hand = described.cards_of(
        options("--gpus", "1", "--gpu-flops", "312T", "--gpu-memory", "40GB", "--mfu", "0.5", "--gpu-price", "1.5")
    )
    assert given_by_hand == Cards(count=1, memory=40 * 10**9, flops=312e12, mfu=0.5, price=1.5)


@pytest.mark.parametrize(
    "argv",
    [
        ("--gpus", "0"), ("--gpus", "-1"), ("--gpus", "1.5"), ("--gpus", "many"), ("--gpus", "99999999"),
        ("--gpu-memory", "80"), ("--gpu-memory", "lots"), ("--gpu-memory", "-80GiB"), ("--gpu-memory", "9999999TiB"),
        ("--gpu-flops", "h1000"), ("--gpu-flops", "0"), ("--gpu-flops", "nan"), ("--mfu", "0"), ("--mfu", "1.01"),
        ("--mfu", "nan"), ("--mfu", "40%"), ("--gpu-price", "-1"), ("--gpu-price", "inf"), ("--goal", "win"),
        ("--method", "prefix"), ("--method", ""),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_the_options_name(argv: tuple[str, str]) -> None:
    given_ = options(*(() if argv[0] == "--gpus" else ("--gpus", "1")), "=".join(argv))
    with pytest.raises(BadInput, match=f"^{argv[0]} "):
        (described.cards_of(given_), described.goal_of(given_), described.method_of(given_))


def test_options_of_cards_without_cards_are_refused() -> None:
    for name in ("--gpu-memory", "--gpu-flops", "--mfu", "--gpu-price", "--goal", "--method"):
        with pytest.raises(BadInput, match=f"^{name}: .*--gpus"):
            described.cards_of(options(name, "1"))


def test_pairs_take_lower_rates_than_answers_and_their_reference_costs_a_forward_pass() -> None:
    plans = {goal: propose(TRAIN, LLAMA_7B, PACKS, on(8), goal=goal, asked="full") for goal in described.GOALS}
    rates = [plans[goal]["learning_rate"] for goal in ("dpo", "orpo", "sft", "pretrain")]
    assert rates == pytest.approx([5e-7, 5e-6, 2e-5, 1.2e-4])
    adapter = {goal: propose(TRAIN, LLAMA_7B, PACKS, on(8), goal=goal, asked="lora") for goal in ("dpo", "orpo")}
    assert adapter["dpo"]["learning_rate"] == pytest.approx(5e-6)
    forward = 2 * 6_738_415_616 * adapter["dpo"]["tokens"]
    assert adapter["orpo"]["flops_of_reference"] == plans["sft"]["flops_of_reference"] == 0
    assert adapter["dpo"]["flops_of_reference"] == pytest.approx(forward, rel=0.1), "and attention"
    assert adapter["dpo"]["hours"] > 1.3 * adapter["orpo"]["hours"]
    twice = replace(Packs.assumed(2048), count=with_steps_packs() // 2)
    once = propose(TRAIN, LLAMA_7B, twice, on(8), goal="dpo", asked="full")
    assert once["flops_of_reference"] == pytest.approx(plans["dpo"]["flops_of_reference"] / 2, rel=0.01)
    assert all("train.objective=dpo" in plan["sets"] for plan in (once, adapter["dpo"]))
    assert plans["dpo"]["warmup_steps"] == math.ceil(plans["dpo"]["steps"] / 10)
    assert propose(TRAIN, LLAMA_7B, PACKS, on(8), goal="dpo")["method"] == "lora"


def with_steps_packs() -> int:
    """Packs that the spec's training sees."""
    return TRAIN.max_steps * TRAIN.micro_batch * TRAIN.accumulation
