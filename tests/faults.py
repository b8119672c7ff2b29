"""Silent faults of distributed training, and the tests that plant each.

    python -m tests.faults            print the table
    python -m tests.faults --write    write it to docs/faults.md

A test declares the fault it plants with `@pytest.mark.fault("stale gradients")`, or for one of its parameters with
`pytest.param(…, marks=pytest.mark.fault("stale gradients"))`. The table is read from the sources; no test is run.
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
    "layers": {
        "a skipped layer is updated": "momentum moves the parameters of a layer that is skipped at random in this step",
        "layers that tie otherwise": "a layer that ties its weights in another way gets the first layer's ties",
        "another layer is skipped": "a layer that is skipped at random is computed, and one that is not is left out",
    },
    "loss": {
        "rows that are not selected": "rows that a mask leaves out count in a sum, or in a mean's divisor",
        "one number of a microbatch": "a median over the batch, which its rows read, is averaged over microbatches",
        "rows written twice": "x[i] += v adds all of v where i has an index twice, of which torch keeps one (refused)",
        "another evaluation": "an evaluation step runs what training computes, where eval mode takes another branch",
        "a loss that holds the model": "a loss reads what forward leaves on the model as it was when that was planned",
        "a changed model": "what a training loop changes of a model stays as planned (refused), or is saved as it was",
        "a step without gradients": "a step under the caller's no_grad or inference mode moves no parameter",
        "zeros for no gradient": "a stage gets zeros for a tensor that later ones read detached: AdamW decays for them",
        "turns without rows": "a turn of a loop that a model leaves out where a mask selects no rows changes a value",
        "mean of means": "each microbatch averages over its own valid tokens, and these averages are averaged",
        "ratio by samples": "a loss normalised by class weights or a ratio is weighted by numbers of samples",
        "sums of a rank": "a function of sums over the batch is differentiated at one rank's or microbatch's sums",
        "one rank's count": "the loss is divided by the valid tokens of one data-parallel rank",
        "divided twice": "data parallel averages gradients whose loss was divided by the whole batch's count already",
        "a factor too many": "the loss has a constant factor too many, or lacks one",
        "another loss reported": "the returned loss is one rank's share of the minimised one",
        "overflow of one rank": "with a loss scale, a rank that sees no overflow steps while another skips",
        "another loss scale on one rank": "a rank whose loop changed the loss scale weights its samples (refused)",
        "norm of scaled gradients": "norm, clipping or update use gradients that still contain the loss scale",
        "NaN of one rank": "a rank with a NaN or an infinity steps, or the other ranks do, or wait for it",
        "narrow sums": "gradients are summed over microbatches or ranks in 16 bits",
        "logits read after their loss": "a loss in place overwrites logits, or a view of them, that are still read",
        "logits in chunks that something else reads": "logits exist in chunks although another op reads all of them",
        "a label outside its chunk": "a label counts in another chunk of the vocabulary than its own",
        "a label that is no class": "a label that is neither a class nor ignored has a loss",
        "samples mixed": "a model that mixes samples mixes those of one microbatch on one rank (it is refused)",
        "samples of a rank": "a loss that compares samples compares those of one microbatch or one rank alone",
        "samples misplaced": "a loss that compares samples takes one's features, or their gradient, for another's",
        "features of another sample": "features go to marked tokens of another sample than theirs (it is refused)",
        "padding among features": "what a mask leaves out of features is moved to tokens before the features",
        "moves on trust": "rows moved by computed indices are assumed to stay with their samples (proved, or refused)",
    },
    "clipping": {
        "tied copies in the norm": "a parameter held by two stages counts twice",
        "replicas in the norm": "a parameter that every tensor-parallel rank holds whole counts once per rank",
        "shards out of the norm": "only the first tensor-parallel rank's part of a split parameter counts",
        "dp replicas in the norm": "without sharding each data-parallel rank adds the same squares",
        "a rank's own norm": "gradients are clipped by one rank's norm, not by the global norm",
        "experts by another group": "two ranks count the same experts' parameters",
        "padding in the norm": "the padding of a flat buffer counts",
    },
    "experts": {
        "experts summed with others": "gradients of experts are summed over ranks that hold other experts",
        "experts scaled by ep": "gradients of experts have a factor ep too many, or lack it",
        "experts of others out of the norm": "the gradient norm counts the experts of one ep rank alone",
        "copies of experts in the norm": "each rank that holds a copy of the same experts adds their squares",
        "auxiliary losses scaled": "a balance or z loss has a factor tp, cp, dp or microbatches, or lacks a part",
        "a bias of some samples": "a bias that balances experts is updated from the counts of one rank",
        "a bias updated per microbatch": "each microbatch updates a buffer, or reads one that another has updated",
        "counts of two forward passes": "recomputed, evaluated or early forward passes count, or all tp ranks do",
        "buffers of other values": "two stages or ranks hold different values of a buffer that a step updates",
        "a bias read too late": "samples read a bias that their own batch has updated (it is refused)",
        "updated buffers forgotten": "a checkpoint or a state dict has the first values of updated buffers",
        "a router's gradient of some tokens": "a router's gradient is not summed over the ranks that split its tokens",
        "a router without gradient": "the weights of a router get no gradient through rows sent to other ranks",
        "rows of the wrong experts": "rows from several ranks are multiplied by other experts than they chose",
        "rows in the wrong places": "rows come back in another order than they were sent in",
        "scores of other rows": "rows that are sent to experts are weighted by the scores of other rows",
        "gradients of one rank's experts": "rows that all experts read get the gradient of one rank's experts alone",
        "batches of other experts": "equal parts of rows come back as those of other experts",
        "capacity of a rank": "an expert's slots are counted per rank, so the mesh says what is lost (it is refused)",
        "a rank without rows": "a rank without tokens leaves out an exchange, and the others wait for it",
        "the same experts everywhere": "every rank starts with the first rank's experts",
        "rows sent once per tp rank": "every tp rank sends the same rows to the experts, which count them tp times",
        "an expert over tp summed twice": "gradients of experts are summed over edp and, as partial ones, over tp",
        "experts over tp out of the norm": "the gradient norm counts the experts of tp rank 0 alone",
        "rows of no expert": "rows past the last expert's are read uninitialised, or lost (they are refused)",
        "experts missing in a checkpoint": "a checkpoint holds one rank's experts, or drops their optimizer state",
        "experts without tokens": "an expert, or a rank of experts, without rows has no gradient, or hangs",
    },
    "statistics over the batch": {
        "statistics of a rank": "each rank normalises its samples by its own mean and variance",
        "statistics of a microbatch": "several microbatches are each normalised by their own statistics (refused)",
        "the other variance": "the variance of the running average is divided by n, or that of samples by n - 1",
        "gradients of a rank's statistics": "the gradient of a statistic is not summed over dp: each rank's is its own",
        "uneven ranks counted alike": "ranks with fewer samples weigh as much as others in the statistics",
        "running statistics of a rank": "running statistics are updated from one rank's samples",
        "running statistics while training": "running statistics normalise in training, or the batch's in evaluation",
    },
    "tied": {
        "tied gradients apart": "the stages that share a parameter do not add up their gradients",
        "tied shards apart": "stages that share a parameter add up shards with different offsets",
        "ties cut": "two chunks of a rank hold separate copies of one parameter",
    },
    "inputs": {
        "an input read as it was given": "what reads an input after forward has written to it sees the old numbers",
        "a branch on the number of samples": "the program repeats the branch of the example's size",
        "later turns of a loop over samples": "turns after those of the trace take its branches (it is refused)",
        "a number of samples read in Python": "the program has the number of samples of its trace (it is refused)",
        "other values of a shared input": "ranks compute a step with different weights of a term (it is refused)",
        "one input written, another read": "two inputs share their memory, and one is written to (it is refused)",
    },
    "buffers": {
        "stale gradients": "gradients are added to those of the previous step",
        "a lost view": "the optimizer reads a gradient that is not the buffer that was reduced",
        "gradients set to None": "after `zero_grad` the optimizer sees no gradient, or an old one",
        "a gradient heard twice": "the hook of a parameter runs twice for one gradient",
        "a gradient of two parameters": "parameters that are read as views share the memory of their gradients",
        "gradients counted at every node": "a split backward pass counts a parameter once per op that uses it",
        "whole tensors wanted": "an optimizer that needs whole tensors updates a rank's part, such as its tp shard",
        "new values stay at the owner": "the owner of a whole parameter keeps its new value to itself",
        "an optimizer of other parameters": "an optimizer built of a closure's parameters steps none that is trained",
        "parameters coupled": "an optimizer that reads several parameters reads those of a rank (it is refused)",
        "embeddings by the matrices' optimizer": "Muon updates embeddings and head too",
        "last microbatch alone": "every microbatch overwrites the gradient of the one before",
        "a bucket never ready": "a bucket waits forever for the gradient of an unused parameter",
        "buckets in another order": "ranks reduce buckets in order of readiness, and add up different ones",
        "reduced too early": "a bucket is reduced when its first microbatch is done",
        "frozen parameters whole": "under ZeRO 3 every rank holds all frozen parameters whole",
        "no gather": "updated shards are not gathered",
        "gather into gradients": "gathered parameters are written into the gradient buffer",
        "shards of another group": "shards are cut for more ranks than there are: no rank updates some elements",
        "gathers in another order": "one rank gathers buckets in another order than the others",
        "read before gathered": "a module reads a parameter that is still being gathered",
        "a block freed too early": "parameters are freed before the last op that reads them",
        "the unused stepped": "weight decay and moments move a parameter that was not used in this step",
        "gradients stay on the device": "the host updates its part of the state with gradients that it does not have",
        "new values stay on the host": "parameters that the host updated do not come back to the device",
        "gradients come back": "the host sends the bytes of gradients in place of new parameters",
        "groups ignored": "parameter groups are lost when parameters become flat",
        "a parameter nobody updates": "a trainable parameter is left out of every buffer",
    },
    "start": {
        "a group of others": "a rank makes a group that it is not in, a member does not, or they differ about members",
        "a group under two names": "members look for each other under different names, and wait for ever",
        "a slow start": "what a rank sets up grows with the world or the length of the pipeline",
        "states of an optimizer in another type": "a resumed run casts the optimizer's states to the parameter's type",
        "another checkpoint on one rank": "ranks that see different folders go on from different checkpoints (refused)",
    },
    "pipeline": {
        "both directions on one communicator": "sends of both directions wait for each other in the steady state",
        "crossed waits": "two ranks wait for each other's message",
        "swapped receives": "two messages of one edge are taken in the wrong order",
        "swapped wires": "two tensors of one message are swapped",
        "swapped stages": "two pipeline ranks run each other's layers",
        "chunks elsewhere": "a rank takes its neighbour's chunks of an interleaved schedule",
        "another type of equal size": "the receiver reads the bytes as another dtype",
        "written while sent": "a tensor is overwritten before its send is done",
        "sized by the first microbatch": "a smaller last microbatch is received into buffers of the first's size",
        "a relay's gradient lost": "a tensor that two later stages read gets only one of its gradients",
        "gradients of integers": "integers and booleans between stages are sent gradients",
        "communicators in another order": "ranks create their communicators in different orders",
        "a warm-up of too many": "with fewer microbatches than stages, the warm-up counts too many forward passes",
        "microbatches that leave a rest": "an interleaved schedule runs with an incomplete group (it is refused)",
        "buffers of another stage": "a stage's buffers, persistent or not, lose their values",
        "weights put off for ever": "a split backward pass never runs its second half",
    },
    "randomness": {
        "masks differ on replicas": "tensor-parallel ranks drop different elements of a replicated tensor",
        "masks of selected rows": "what is dropped of a row that a mask selects depends on which others are selected",
        "masks by stage": "dropped elements depend on the cut into stages",
        "masks drawn anew": "recomputation drops other elements than the first pass",
        "masks that repeat": "every step drops the same elements",
        "draws differ on replicas": "tensor-parallel ranks draw different numbers for a replicated tensor",
        "draws without the op": "two random ops draw the same numbers",
        "draws made anew": "recomputation draws other numbers than the first pass",
        "draws that repeat": "every step, or every sample, draws the same numbers",
        "draws of local positions": "numbers of a split tensor are drawn for the rank's own positions",
        "draws of a rank's own samples": "samples are counted from 0 on each data-parallel rank, or in the wrong dim",
        "one draw per microbatch": "numbers that one forward pass draws once are drawn once per microbatch",
        "values by cut": "a parameter's first value depends on what else its rank holds",
        "masks of local positions": "a split tensor's mask is drawn for the rank's own positions, or for the wrong dim",
        "one draw for ever": "a program repeats a number drawn by Python's random, or a count, from the trace",
        "masks of conversions": "an op's key depends on the conversions that a plan inserts before it",
        "masks of local samples": "samples are counted within the microbatch or the data-parallel rank",
    },
    "backward passes of one's own": {
        "no_grad within autocast": "gradients flow through what no_grad computes in a region of disabled autocast",
        "written under no_grad": "a write under no_grad cuts the gradient that the tensor keeps (it is refused)",
        "a write's gradient lost": "what is written to a detached tensor has no gradient, as in torch's own form",
        "only the forward traced": "the backward of a user's Function or hook is replaced by that of its forward",
        "a hook's state frozen": "a number that a forward hook counts up is that of the trace in every step",
        "hooks in another order": "two hooks on one tensor are applied in reverse order",
        "gradients of samples mixed": "a backward pass that mixes samples sees one microbatch of them (it is refused)",
        "parts of gradients clipped": "a parameter's gradient is clipped in parts, one per microbatch (it is refused)",
        "backward hooks ignored": "hooks on modules and parameters are not part of the program (it is refused)",
        "another function of that name": "a program calls another function of the same name and text",
    },
    "recomputation": {
        "kept after all": "a policy saves what it should recompute, or recomputes what it should save",
        "unwritten activations": "activations go to the host before they are written",
        "mixed activations": "the activations of a storage are taken for those of another",
        "old activations": "the activations of a storage are taken for those of its earlier version",
        "views without offsets": "activations come back as the start of their storage",
        "unchecked versions": "a saved tensor that stays on the device is written, and its version not checked",
        "experts chosen anew": "recomputation routes again, and a tie falls to another expert than in the first pass",
    },
    "devices": {
        "a constant on the host": "a program computes with a tensor that stayed on the host",
        "a collective of the host's tensors": "a collective is given a tensor of the host",
        "the host waits in a step": "each microbatch waits for a number of the device, so no kernel is queued ahead",
        "a copy from pageable memory": "a copy to the device makes the host wait until it is done",
        "gradients still on their way": "the host reads memory to which the device copies, or writes what it reads",
        "a stream that does not wait": "kernels read what another stream has not written yet, and no event says so",
        "a collective on the wrong stream": "a collective starts, or is awaited, on a stream that others do not follow",
        "a buffer reused too early": "memory is written, or given away, while another stream still works on it",
        "communicators in a circle": "ranks queue collectives or messages each waiting for a later one of the other",
    },
    "tensor parallel": {
        "a chunk off by one": "a product around the ring takes another rank's rows",
        "the last chunk missed": "the gradient of a weight, or of its bias, lacks the rows that arrive last",
        "a bias on every rank": "the bias of a row-split product is added once per rank",
        "a norm's gradient not summed": "norms and biases over a split sequence keep their own rank's partial value",
        "summed twice": "a gradient that is already whole is summed over the ranks",
        "partial values not summed": "each rank takes its own partial value for the whole sum",
        "gradient of a gather": "the gradients of other ranks' shares are dropped",
        "heads that do not divide": "tp does not divide the heads, so ranks have parts of heads (it is refused)",
        "a vocabulary that does not divide": "a table is padded, and its padding gets probability (it is refused)",
        "key heads of a neighbour": "with fewer key heads than ranks, a rank takes the key heads of other queries",
        "labels across the cut": "ignored labels count in a loss over a split vocabulary",
    },
    "context parallel": {
        "positions of a rank": "a rank counts the positions of its own tokens from 0",
        "labels of other tokens": "a rank's logits are compared with the labels of other tokens",
        "keys of another rank": "in a step of the ring, a block of keys is taken for that of another rank",
        "sums of other maxima": "exponentials under different maxima are added",
        "mask off the diagonal": "the causal mask between blocks or within one is off by one",
        "gradients of keys stay": "gradients of keys and values do not return to their owner, or not all of them",
        "gradients of one cp rank": "gradients are not summed over the cp ranks",
        "a loss for each cp rank": "every cp rank reports or counts the whole loss",
    },
    "compile": {
        "compiled every step": "a graph contains a number that changes every step, and is compiled again each time",
        "compiled for every layer": "layers of one class are compiled one by one, or only up to a limit",
        "a backend that computes another thing": "compiled blocks do not compute what plain ones do",
        "hooks lost in compiled blocks": "a compiled block reads parameters that are still being gathered",
    },
}


def planted() -> dict[str, list[str]]:
    """Return fault -> the tests that plant it, as `folder/test_file.py::test_name[parameter]`."""
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
    """Return the names in `pytest.mark.fault("…", …)`."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "pytest.mark.fault":
        return []
    return [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


def _shown(args: list[ast.expr]) -> str:
    return ", ".join(str(arg.value) if isinstance(arg, ast.Constant) else ast.unparse(arg) for arg in args[:2])


def page() -> str:
    """Return the table as Markdown."""
    tests = planted()
    lines = [
        "# Silent faults",
        "",
        "Distributed training can go wrong without an error, while the loss still falls. A test plants each",
        "fault below, and fails unless parity with one process breaks or the program refuses to run.",
        "",
        "`make faults` writes this page. A test fails when the page is stale or a fault has no test.",
    ]
    for area, faults in FAULTS.items():
        if faults:
            lines += ["", f"## {area[0].upper()}{area[1:]}", "", "| fault | planted by |", "|---|---|"]
            lines += [f"| {text} | {_cell(tests.get(fault, []))} |" for fault, text in faults.items()]
    return "\n".join([*lines, ""])


def _cell(tests: list[str]) -> str:
    return "<br>".join(f"`{test}`".replace("|", r"\|") for test in tests) or "**nothing**"


def mistakes() -> list[str]:
    """List faults without a test, marks without a fault, and whether the page is stale."""
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
