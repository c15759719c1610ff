"""From a float model to a quantised one, step by step: calibrate, measure, give out bits, quantise, write.

Every step leaves its result in the job's folder, and begins with what the one before left there: a job that
is killed goes on behind its last step and ends with the same bytes. One layer is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .. import spec
from ..errors import InputError
from ..formats import PackedWeight
from . import measure, streams
from .allocate import Allocation, below, least, within
from .gptq import solve_gptq
from .head import solve_head
from .job import damaged
from .kinds import kinds_count, kinds_of
from .layers import run
from .measurement import Measurement, Profile, quantised, read_profile, smallest
from .output import kept_bytes
from .recipe import HEAD, Recipe
from .rounding import factors
from .solve import solve
from .streams import Streams
from .tape import TAPE
from .work import Work

AHEAD, BACK, ROUND, HEAD_UNITS = 1, 6, 12, 12  # units of the progress bar: how long steps take

GPTQ_DAMPING = 0.02
"""At least: with few widths to choose from, GPTQ alone follows little text too closely."""

CARE = "|care"
"""Behind a role: how much each token's answer matters, beside how the outputs matter together."""

LOWER = 0.9
"""How much better than needed a second try is meant to be."""


def units(depth: int, measures: bool) -> int:
    """Of a whole job."""
    return depth * ((AHEAD + BACK if measures else 0) + ROUND) + 2 * HEAD_UNITS


@torch.no_grad()
def listen(work: Work, measures: bool) -> None:
    """Gradients at every matrix's outputs and, with `measures`, its profile; from the last layer down."""
    job, depth = work.job, work.depth
    work.step(0, "measuring")
    if job.noted("listened"):
        work.step(depth * (AHEAD + BACK), "measuring")
        return
    begun = next((i for i in range(depth + 1) if job.has(f"slope.{i}")), depth)
    slopes = job.load(f"slope.{begun}") if job.has(f"slope.{begun}") else _first_slopes(work)
    work.step(depth * AHEAD + (depth - begun) * BACK, "measuring")
    for i in reversed(range(begun)):
        slopes = _go_back(work, i, slopes, measures)
        work.step(BACK, f"measuring layer {i}")
    job.note("listened", True)
    job.drop("slope.0", "state.0")


def _first_slopes(work: Work) -> dict[str, Tensor]:
    """The gradients behind the last layer; how much each token matters to each kind of logits is kept."""
    states, head, slopes, care = _go_ahead(work), work.shop.top(), {}, []
    belongs = _head_kinds(work)
    for i, batch in enumerate(work.batches()):
        generator = torch.Generator().manual_seed(work.wishes.seed + i)
        x = states[f"{i:04}"].to(batch.ids.device)
        slopes[f"{i:04}"], mattering = measure.first_slope(head, x, batch, generator, belongs)
        care.append(mattering.flatten(0, 1))
    work.job.save("gradients.head", {f"head{CARE}": torch.cat(care)})
    work.job.save(f"slope.{work.depth}", slopes)
    return slopes


def _go_ahead(work: Work) -> dict[str, Tensor]:
    """The float model's states before every layer, each kept until the way back has passed it; the last."""
    job, batches = work.job, work.batches()
    begun = max((i for i in range(work.depth + 1) if job.has(f"state.{i}")), default=0)
    if job.has(f"state.{begun}"):
        states = job.load(f"state.{begun}")
    else:
        embedding = work.shop.bottom()
        states = {f"{i:04}": embedding.forward(b) for i, b in enumerate(batches)}
        job.save("state.0", states)
    for layer in range(begun, work.depth):
        block = work.shop.layer(layer)
        for key, b in ((f"{i:04}", b) for i, b in enumerate(batches)):
            states[key] = run(block, states[key].to(b.ids.device), b)
        if not all(bool(torch.isfinite(x).all()) for x in states.values()):
            raise InputError(
                f"layers.{layer}: the source model's answers hold NaN or infinity on the calibration text. "
                "Calibrate with other text, or check the source model with `exlm eval`."
            )
        job.save(f"state.{layer + 1}", states)
    return states


def _go_back(work: Work, layer: int, slopes: dict[str, Tensor], measures: bool) -> dict[str, Tensor]:
    """Through one layer; the gradients before it."""
    job, effort = work.job, work.wishes.effort
    block = work.shop.layer(layer)
    ear = measure.Ear(work.shop.taps)
    states, carried = job.load(f"state.{layer}"), {}
    for key, batch in ((f"{i:04}", b) for i, b in enumerate(work.batches())):
        device = batch.ids.device
        slope = slopes[key].to(device, copy=True)  # sums may differ with where numbers begin in memory
        carried[key] = measure.carry_back(block, states[key].to(device), batch, slope)
    kept = {}
    for role, heard in ear.heard.items():
        if heard.gradients.dim() == 2:
            kept[role] = (heard.gradients / heard.gradients.diagonal().mean().clamp(min=1e-30)).half()
        if ".experts." not in role:
            kept[f"{role}{CARE}"] = torch.cat(heard.care)
        if measures:
            w = work.shop.taps[role].data.T.contiguous()
            found = measure.profile(w, heard, effort.damping, effort.ridge, role)
            job.note(f"profile.{role}", found.to_json())
    job.save(f"gradients.{layer}", kept)
    job.save(f"slope.{layer}", carried)
    job.drop(f"slope.{layer + 1}", f"state.{layer + 1}")
    return carried


def measured(work: Work) -> Measurement:
    """What `listen` has found."""
    profiles: dict[str, Profile] = {}
    roles = [m.role for m in quantised(work.model)]
    for role in roles:
        raw = work.job.noted(f"profile.{role}")
        if raw is not None:
            path = work.job.folder / f"profile.{role}.json"
            try:
                profiles[role] = read_profile(raw, path, role)
            except InputError as error:
                raise damaged(path, error) from error
    for role in roles:
        if role not in profiles:
            profiles[role] = _like(role, profiles)
    return Measurement.of(profiles, work.model)


def _like(role: str, profiles: Mapping[str, Profile]) -> Profile:
    """For an expert that no token of the calibration reached: that of one beside it."""
    before, _, rest = role.partition(".experts.")
    part = rest.rpartition(".")[2]
    for other, found in profiles.items():
        if other.startswith(f"{before}.experts.") and other.endswith(f".{part}"):
            return found
    raise InputError(f"{role}: no token of the calibration reached it. Calibrate with more text.")


def allocate(work: Work, measurement: Measurement) -> Allocation:
    """The choice of every slot that meets the target."""
    wishes = work.wishes
    weights = sum(m.in_features * m.out_features for m in quantised(work.model))
    if wishes.max_kld is not None:
        if not measurement.profiles:
            raise InputError("max_kld needs a measurement by exlm: the old converter's has other errors.")
        aim = _aim(work)
        return below(measurement.slots, max(aim, least(measurement.slots)) if aim else wishes.max_kld)
    if wishes.bits is not None:
        return within(measurement.slots, int(weights * wishes.bits), weights)
    assert wishes.size is not None
    return within(measurement.slots, 8 * wishes.size - _beside(work), weights)


def check_target(work: Work, known: Measurement | None) -> None:
    """`InputError` before any work, if the fewest bits that matrices can take are too many."""
    wishes = work.wishes
    if known is None:
        fewest = smallest(work.model)
    else:
        fewest = sum(min(choice.bits for choice in slot) for slot in known.slots)
    weights = sum(m.in_features * m.out_features for m in quantised(work.model))
    if wishes.bits is not None and fewest > int(weights * wishes.bits):
        raise InputError(
            f"{wishes.bits:g} bits a weight cannot be reached: the smallest this model can be is "
            f"{fewest / weights:.3f}, scales and orders of rows included. Ask for more bits."
        )
    if wishes.size is not None and fewest > 8 * wishes.size - _beside(work):
        beside = -(-_beside(work) // 8)
        raise InputError(
            f"A size of {wishes.size:,} bytes cannot be reached: the smallest this model can be is "
            f"{beside - (-fewest // 8):,}, of which {beside:,} are embedding and norms in float16, and the "
            f"head in {wishes.head_bits} bits. Ask for more, or for fewer head_bits."
        )


def _beside(work: Work) -> int:
    """The bits of what is no matrix of a layer: the head, and what stays as it is."""
    head = HEAD[work.wishes.head_bits].bits(work.matrices["head"])
    return head + 8 * kept_bytes(work.plan, work.model, work.matrices.keys())


def aim_again(work: Work, found: float) -> bool:
    """After a model that diverges by `found`: aim lower by as much as it missed, once; False the second time.

    The layers are then to be quantised anew.
    """
    wanted = work.wishes.max_kld
    assert wanted is not None
    if _aim(work) is not None:
        return False
    work.job.drop(
        "layer.head", f"streams.{work.depth}"
    )  # before the note: a kill between repeats the first try
    work.job.note("aim", {"wanted": wanted, "harm": LOWER * wanted * wanted / found})
    work.done = work.total - work.depth * ROUND - HEAD_UNITS
    return True


def _aim(work: Work) -> float | None:
    """The harm that is aimed at once the first try has missed."""
    noted = work.job.noted("aim")
    try:
        return float(noted["harm"]) if noted is not None and noted["wanted"] == work.wishes.max_kld else None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged(work.job.folder / "aim.json", repr(error)) from error


@torch.no_grad()
def quantise(work: Work, recipes: Mapping[str, Recipe]) -> None:
    """Every layer in turn, then the head, on the streams of the calibration."""
    job, shop, batches = work.job, work.shop, work.batches()
    begun = [i for i in range(work.depth + 1) if job.has(f"streams.{i}")]
    if begun:
        s = Streams.of(job.load(f"streams.{begun[-1]}"), batches)
        work.step(ROUND * begun[-1], "quantising")
    else:
        embedding = shop.bottom()
        x = [embedding.forward(batch).contiguous() for batch in batches]
        s, begun = Streams(list(x), list(x), batches), [0]
        job.save("streams.0", s.tensors())
    for layer in range(begun[-1], work.depth):
        block = shop.layer(layer)
        exact = {role: tap.data for role, tap in shop.taps.items()}
        kept = _gradients(work, str(layer))
        made = streams.quantise(
            shop.taps,
            lambda x, batch, block=block: run(block, x, batch),  # type: ignore[misc]
            s,
            lambda role, w, h, kept=kept: _solved(work, recipes, role, w, h, kept.get(role)),  # type: ignore[misc]
            damping(work),
            _cares(kept),
            _adding(work.model.layers[layer], layer),
        )
        streams.advance(shop.taps, exact, lambda x, batch, block=block: run(block, x, batch), s)  # type: ignore[misc]
        streams.check_finite(s, f"layers.{layer}")
        _keep(work, f"layer.{layer}", made)
        job.note(f"layer.{layer}", {"error": s.error(), "bits": {r: w.bits for r, w in made.items()}})
        job.save(f"streams.{layer + 1}", s.tensors())
        job.drop(f"streams.{layer}")
        work.step(ROUND, f"quantising layer {layer}")
    if "head" in work.matrices and not job.has("layer.head"):
        _quantise_head(work, recipes, s)
    TAPE.clear()
    work.step(HEAD_UNITS, "quantising the head")


def _quantise_head(work: Work, recipes: Mapping[str, Recipe], s: Streams) -> None:
    """The last matrix, its columns in the kinds that `listen` put them into."""
    head, effort = work.shop.top(), work.wishes.effort
    tap, care = work.shop.taps["head"], _gradients(work, "head")[f"head{CARE}"]
    heard = streams.hear_kinds(tap, lambda x, batch: head.forward(x, None, batch)[0], s, care)
    exact = tap.data.T.contiguous()
    groups = recipes["head"].groups(len(exact))
    effort = replace(effort, sweeps=2 * effort.sweeps)
    made = solve_head(exact, *heard, _head_kinds(work), groups, effort, damping(work))
    _keep(work, "layer.head", {"head": made.pack(None if tap.bias is None else tap.bias.half())})


def _head_kinds(work: Work) -> Tensor:
    """(columns, kinds) of the head that was built last."""
    matrix = work.shop.taps["head"].data
    return kinds_of(matrix, kinds_count(matrix.shape[1], len(matrix)), work.wishes.seed)


def _gradients(work: Work, name: str) -> dict[str, Tensor]:
    """What `listen` kept of a layer or the head; nothing if it was not asked to."""
    return work.job.load(f"gradients.{name}") if work.job.has(f"gradients.{name}") else {}


def _cares(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By role, how much each token's answer matters."""
    return {role.removesuffix(CARE): care for role, care in kept.items() if role.endswith(CARE)}


def _adding(layer: spec.Layer, number: int) -> list[str]:
    """Roles whose answers are added to the stream as they are."""
    if layer.residual_scale != 1.0:
        return []
    ends = {"attn.o": layer.attn_post, "mlp.down": layer.mlp_post}
    return [f"layers.{number}.{end}" for end, norm in ends.items() if norm is None]


def damping(work: Work) -> float:
    """What is added to a Hessian's diagonal, as a share of its mean."""
    wanted = work.wishes.effort.damping
    return max(wanted, GPTQ_DAMPING) if work.wishes.method == "gptq" else wanted


def _solved(
    work: Work, recipes: Mapping[str, Recipe], role: str, w: Tensor, h: Tensor, gradients: Tensor | None
) -> tuple[Tensor, PackedWeight]:
    """One matrix rounded, as values and as files have it."""
    effort, bias = work.wishes.effort, work.shop.taps[role].bias
    half = None if bias is None else bias.half()
    f = factors(w, h, damping(work), role)
    if work.wishes.method == "gptq":
        return solve_gptq(w, f, work.wishes.group_size, effort.sweeps, half)
    outputs = None
    if gradients is not None:
        outputs = measure.output_side(gradients.to(w.device).float(), effort.ridge)
    made = solve(w, f, recipes[role].groups(len(w)), effort, outputs)
    return made.dequantize(), made.pack(half)


def _keep(work: Work, name: str, made: Mapping[str, PackedWeight]) -> None:
    tensors = {
        f"{role}|{k}": t for role, weight in made.items() for k, t in work.stored(role, weight).items()
    }
    work.job.save(name, tensors)


def stored(work: Work, role: str) -> dict[str, Tensor]:
    """A quantised matrix's tensors, as `quantise` left them."""
    name = "layer.head" if role == "head" else f"layer.{role.split('.')[1]}"
    tensors = work.job.load(name)
    return {key.partition("|")[2]: t for key, t in tensors.items() if key.partition("|")[0] == role}
