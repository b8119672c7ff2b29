"""What distributed training gets wrong in silence, fault by fault, and the tests that plant each.

    python -m tests.faults            print the table
    python -m tests.faults --write    write it to docs/faults.md

A test says which fault it plants with `@pytest.mark.fault("stale gradients")`, or for one of its parameters with
`pytest.param(…, marks=pytest.mark.fault("stale gradients"))`. The table is read off the sources; nothing is run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"

# area -> fault -> what goes wrong
FAULTS: dict[str, dict[str, str]] = {
    "loss": {
        "mean of means": "each microbatch averages over its own valid tokens, and these averages are averaged",
        "ratio by samples": "a loss that something else normalises is weighed by samples: class weights, ratios",
        "sums of a rank": "a function of sums over the batch is differentiated at the sums of a rank or microbatch",
        "one rank's count": "the loss is divided by the valid tokens of one data-parallel rank",
        "divided twice": "data parallel averages gradients whose loss was divided by the whole batch's count already",
        "a factor too many": "a constant factor in the loss, or none where one belongs",
        "another loss reported": "the loss that is returned is one rank's share of the one that is minimised",
        "overflow of one rank": "with a loss scale, a rank that sees no overflow steps while another skips",
        "norm of scaled gradients": "norm, clipping or update take gradients with the loss scale still in them",
        "NaN of one rank": "a rank with a NaN or an infinity steps, and the others too, or wait for it",
        "narrow sums": "gradients are summed over microbatches or ranks in 16 bits",
        "logits read after their loss": "a loss in place overwrites logits, or a view of them, that others still read",
        "samples mixed": "a model that mixes samples mixes those of a microbatch and rank alone (it is refused)",
        "moves on trust": "rows that computed indices move are taken to stay with their samples (proved, or refused)",
    },
    "clipping": {
        "tied copies in the norm": "a parameter held by two stages counts twice",
        "replicas in the norm": "a parameter that every tensor-parallel rank holds whole counts once for each",
        "shards out of the norm": "of a split parameter only the first tensor-parallel rank's part counts",
        "dp replicas in the norm": "without sharding each data-parallel rank adds the same squares",
        "a rank's own norm": "gradients are clipped by what one rank sees, not by the global norm",
        "experts by another group": "a rank counts experts' parameters that another one counts as well",
        "padding in the norm": "what pads a flat buffer counts",
    },
    "tied": {
        "tied gradients apart": "the stages that share a parameter do not add up their gradients",
        "tied shards apart": "they add up shards that begin elsewhere on each",
        "ties cut": "two chunks of a rank hold a copy each of what is one parameter",
    },
    "buffers": {
        "stale gradients": "the flat gradient of the step before is added to",
        "a lost view": "the optimizer reads a gradient that is no longer the buffer that was reduced",
        "gradients set to None": "after `zero_grad` the optimizer sees no gradient, or an old one",
        "a gradient heard twice": "the hook of a parameter runs twice for one gradient",
        "gradients counted at every node": "a parameter that several ops use counts again at each, in two halves",
        "whole tensors wanted": "an optimizer that looks at whole tensors steps pieces of them (it is refused)",
        "last microbatch alone": "every microbatch overwrites the gradient of the one before",
        "a bucket never ready": "a bucket waits for ever for the gradient of a parameter that was not used",
        "buckets in another order": "ranks reduce buckets as they become ready, and add up different ones",
        "reduced too early": "a bucket is reduced when its first microbatch is done",
        "frozen parameters whole": "under ZeRO 3 every rank holds all of what is not trained",
        "no gather": "updated shards are not collected",
        "gather into gradients": "collected parameters land in the gradient buffer",
        "shards of another group": "shards are cut for more ranks than there are: some elements nobody updates",
        "gathers in another order": "a rank collects buckets in the order of its list, the others as modules read them",
        "read before gathered": "a module reads a parameter that is still on its way",
        "the unused stepped": "weight decay and moments move a parameter that nobody used in this step",
        "groups ignored": "parameter groups are lost when parameters become flat",
        "a parameter nobody updates": "a trainable parameter is left out of every buffer",
    },
    "pipeline": {
        "both directions on one communicator": "sends of both directions wait for each other in the steady state",
        "crossed waits": "two ranks wait for each other's message",
        "swapped receives": "two messages of one edge are taken in the wrong order",
        "swapped wires": "two tensors of one message change places",
        "swapped stages": "two pipeline ranks run each other's layers",
        "chunks elsewhere": "a rank takes its neighbour's chunks of an interleaved schedule",
        "another type of equal size": "the receiver reads the bytes as another dtype",
        "written while sent": "a tensor is written before its send is done",
        "sized by the first microbatch": "a smaller last microbatch is received into buffers of the first's size",
        "a relay's gradient lost": "of a tensor that two later stages read, one's gradient is dropped",
        "gradients of integers": "integers and booleans between stages are sent gradients",
        "communicators in another order": "ranks create their communicators in different orders",
        "a warm-up of too many": "with fewer microbatches than stages, the warm-up counts forwards that there are not",
        "microbatches that leave a rest": "an interleaved schedule runs with a rest of a group (it is refused)",
        "buffers of another stage": "a stage's buffers, kept in checkpoints or not, lose their values",
        "weights put off for ever": "a backward pass in two halves forgets the second",
    },
    "randomness": {
        "masks differ on replicas": "tensor-parallel ranks drop different elements of what each holds whole",
        "masks by stage": "what is dropped depends on the cut into stages",
        "masks drawn anew": "recomputation drops other elements than the first pass",
        "masks that repeat": "every step drops the same elements",
        "values by cut": "a parameter's first value depends on what else its rank holds",
        "masks of local positions": "a split tensor's mask is drawn for positions, or a dim, that only the rank knows",
        "one draw for ever": "a program repeats what a trace drew with Python's random, or a count of forward passes",
        "masks of conversions": "the key of an op counts the conversions that a plan writes before it",
        "masks of local samples": "samples are counted within the microbatch or the data-parallel rank",
    },
    "backward passes of one's own": {
        "only the forward traced": "of a Function or hook of the user's own only the forward's ops are differentiated",
        "hooks in another order": "of two hooks on one tensor the later one is applied first",
        "gradients of samples mixed": "a backward pass that mixes samples sees one microbatch of them (it is refused)",
        "parts of gradients clipped": "a parameter's gradient is clipped in parts, one per microbatch (it is refused)",
        "backward hooks ignored": "hooks on modules and parameters are not part of the program (it is refused)",
        "another function of that name": "a program calls another function of the same name and text",
    },
    "recomputation": {
        "kept after all": "a policy keeps what it should recompute, or computes again what it should keep",
    },
    "tensor parallel": {
        "a bias on every rank": "the bias of a row-split product is added once per rank",
        "a norm's gradient not summed": "norms and biases over a split sequence keep their own rank's partial value",
        "summed twice": "a gradient that is whole already is summed over the ranks",
        "partial values not summed": "of partial sums each rank takes its own as the whole",
        "gradient of a gather": "the gradients of other ranks' shares are dropped",
        "heads that do not divide": "more or uneven tensor-parallel ranks than heads: parts of heads (it is refused)",
        "a vocabulary that does not divide": "a table is padded, and its padding gets probability (it is refused)",
        "key heads of a neighbour": "with fewer key heads than ranks, a rank takes those of other queries",
        "labels across the cut": "ignored labels count in a loss over a split vocabulary",
    },
    "context parallel": {
        "positions of a rank": "a rank counts the positions of its own tokens from 0",
        "labels of other tokens": "a rank's logits are held against the labels of other tokens",
        "keys of another rank": "in a step of the ring a block of keys is taken for another rank's",
        "sums of other maxima": "a block's exponentials are added to those under another maximum",
        "mask off the diagonal": "the causal mask between blocks or within one is off by one",
        "gradients of keys stay": "gradients of keys and values do not come home, or not all of them",
        "gradients of one cp rank": "gradients are not summed over the ranks that share the tokens",
        "a loss for each cp rank": "every rank that shares the tokens reports or counts the whole loss",
    },
    "compile": {
        "compiled every step": "a graph knows what moves on with every step, and is compiled again for each",
        "compiled for every layer": "layers of one class are compiled one by one, or until a limit and then not at all",
        "a backend that computes another thing": "compiled blocks do not compute what plain ones do",
        "hooks lost in compiled blocks": "a compiled block reads parameters that are still being collected",
    },
}


def planted() -> dict[str, list[str]]:
    """Fault -> the tests that plant it, `folder/test_file.py::test_name[parameter]`."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text("utf-8")
        if "mark.fault(" in text:
            for fault, test in _marks(ast.parse(text)):
                found.setdefault(fault, []).append(f"{path.relative_to(TESTS).as_posix()}::{test}")
    return found


def _marks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
            continue
        for decorator in function.decorator_list:
            for fault in _faults(decorator):
                yield fault, function.name
            for call in ast.walk(decorator):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.param":
                    marks = [keyword.value for keyword in call.keywords if keyword.arg == "marks"]
                    for fault in [fault for mark in marks for node in ast.walk(mark) for fault in _faults(node)]:
                        yield fault, f"{function.name}[{_shown(call.args)}]"


def _faults(node: ast.AST) -> list[str]:
    """Of `pytest.mark.fault("…", …)`."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "pytest.mark.fault":
        return []
    return [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


def _shown(args: list[ast.expr]) -> str:
    return ", ".join(str(arg.value) if isinstance(arg, ast.Constant) else ast.unparse(arg) for arg in args[:2])


def page() -> str:
    """The table as Markdown."""
    tests = planted()
    lines = [
        "# Silent faults",
        "",
        "Distributed training goes wrong without an error: losses fall all the same. Each fault below is planted on",
        "purpose by a test, which fails unless parity with one process breaks, or the program refuses to run.",
        "`make faults` writes this page; a test fails when it is stale, or when a fault has no test.",
    ]
    for area, faults in FAULTS.items():
        if faults:
            lines += ["", f"## {area[0].upper()}{area[1:]}", "", "| fault | planted by |", "|---|---|"]
            lines += [f"| {text} | {_cell(tests.get(fault, []))} |" for fault, text in faults.items()]
    return "\n".join([*lines, ""])


def _cell(tests: list[str]) -> str:
    return "<br>".join(f"`{test}`".replace("|", r"\|") for test in tests) or "**nothing**"


def mistakes() -> list[str]:
    """Faults without a test, marks without a fault, and a page that is not the table."""
    tests, known = planted(), [fault for faults in FAULTS.values() for fault in faults]
    wrong = [f"nothing plants {fault!r}" for fault in known if fault not in tests]
    wrong += [f"{where[0]} plants {fault!r}, which is no row" for fault, where in tests.items() if fault not in known]
    wrong += [f"{fault!r} stands twice" for fault in set(known) if known.count(fault) > 1]
    if not PAGE.exists() or PAGE.read_text("utf-8") != page():
        wrong.append("docs/faults.md is stale: run `make faults`")
    return wrong


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(), "utf-8")
    print(page())
    sys.exit("\n".join(mistakes()) or None)
