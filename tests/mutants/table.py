"""Sixty faults: plausible mistakes, each a small edit of one file of `launcher/`.

Each fault shows in one situation only: with accumulation, at one stage, with tied parameters, after resuming, or in the
last bucket. The tests must detect every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Args:
        file: below `launcher/`.
        old: the original text; it occurs exactly once in the file.
        new: the faulty text.
        fault: description of the effect.
        near: tests to run first, below `tests/`; default: those of the package.
    """

    file: str
    old: str
    new: str
    fault: str
    near: str = ""

    @property
    def nearby(self) -> list[str]:
        """Return the files and directories of the tests to run first."""
        return [f"tests/{part}" for part in (self.near or self.file.partition("/")[0]).split()]

    def applied(self, text: str) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times: {self.old}")
        return text.replace(self.old, self.new)


MUTANTS = {
    # zero: shards, gathers, reductions, norm
    "settle-leaves-out-whole-gradients": Mutant(
        "zero/reduce.py",
        "return self.unsent if gradient.sharded else not gradient.reduced",
        "return self.unsent",
        "with managed_gradient_accumulation false, gradients of stages 0 and 1 are never reduced",
        near="engine/test_aids.py",
    ),
    "mean-over-tp-too": Mutant(
        "zero/model.py",
        "return 1.0 if divided is None else self.axis.degree / divided",
        "return 1.0 if divided is None else self.axis.degree * self.tp.degree / divided",
        "under tensor parallelism gradients are divided by all ranks, not by those of dp",
        near="tensor",
    ),
    "second-shard-of-the-step-before": Mutant(
        "zero/flat.py",
        "        for feature in self.gather_features:\n            feature.on_change()\n",
        "",
        "with hpZ, what is gathered after a step are the parameters from before it",
        near="zero/test_groups.py",
    ),
    "unused-keeps-its-last-gradient": Mutant(
        "zero/gradients.py",
        "            if grad is None:\n"
        "                if not accumulate:\n"
        "                    region.zero_()\n"
        "            elif grad.data_ptr() != region.data_ptr():\n",
        "            if grad is not None and grad.data_ptr() != region.data_ptr():\n",
        "a parameter without a gradient contributes what the buffer had of another step or unit, not zeros",
        near="zero/test_models.py",
    ),
    "sum-over-all-key-value-heads": Mutant(
        "zero/features/holders.py",
        "places.append(slice(end + part.group * term.numel(), end + (part.group + 1) * term.numel()))",
        "places.append(slice(end, end + term.numel()))",
        "where tp ranks share key-value heads in groups, each head gets the sum of all heads' gradients",
        near="tensor",
    ),
    "edits-are-those-of-rank-0": Mutant(
        "zero/features/edits.py",
        'broadcast(full[slot.span], flat.axes.dp, f"{flat.name}/edit", source=source).wait()',
        'broadcast(full[slot.span], flat.axes.dp, f"{flat.name}/edit", source=0).wait()',
        "GatheredParameters(modifier_rank=1) keeps the values of rank 0",
        near="zero/test_context.py",
    ),
    "norm-of-one-pipeline-stage": Mutant(
        "zero/norm.py",
        '    if zero.policy.compute_norm:\n        all_reduce(report[:1], zero.pp, "root/norm").wait()\n',
        "",
        "each pipeline stage clips, and skips on overflow, by the norm of its own gradients",
        near="pipeline",
    ),
    "prefetch-passes-over-the-next": Mutant(
        "zero/unshard.py",
        "        prefetched = 0\n        for unit in self._order[self._next :]:\n",
        "        prefetched = 0\n        for unit in self._order[self._next + 1 :]:\n",
        "the unit after the next one is gathered ahead, and the next one only when it is met",
        near="zero/test_unshard.py zero/test_keys.py",
    ),
    "last-gather-bucket-is-left-out": Mutant(
        "zero/flat.py",
        "for at in range(0, self.shard.numel(), size)]",
        "for at in range(0, max(size, self.shard.numel() // size * size), size)]",
        "at stages 1 and 2 what follows the last whole allgather bucket never comes back from its owner",
        near="zero/test_parity.py zero/test_gradient_keys.py zero/test_keys.py",
    ),
    "loaded-parameters-are-not-awaited": Mutant(
        "zero/model.py",
        "        for pending in [pending for flat in self.flats for pending in flat.publish()]:\n"
        "            pending.wait()\n",
        "        for flat in self.flats:\n            flat.publish()\n",
        "after a load at stages 1 and 2 a rank has old values in the other ranks' slices of the parameters",
        near="engine/test_resume.py",
    ),
    "tied-norm-counts-twice": Mutant(
        "zero/gradients.py",
        "        if self.flat.slots[0].holders.rank > 0:\n"
        "            return torch.zeros((), dtype=torch.float64)\n",
        "",
        "a tied parameter on two pipeline stages counts twice in the norm",
        near="pipeline",
    ),
    # comm: bytes between ranks
    "scale-of-the-largest-value": Mutant(
        "comm/quantized.py",
        "scales = blocks.abs().amax(dim=1) / most",
        "scales = blocks.amax(dim=1) / most",
        "a quantised block is scaled by its largest value, not magnitude: large negative values are cut off",
    ),
    "quantised-sum-forgets": Mutant(
        "comm/quantized.py",
        "total = out.clone() if accumulate else torch.zeros_like(out)",
        "total = torch.zeros_like(out)",
        "with quantised gradients and accumulation only the last microbatch counts",
        near="zero/test_quantized.py comm",
    ),
    "levels-swapped": Mutant(
        "comm/collectives.py",
        "first = _gather(slices[inside.rank :: inside.degree], across, tag)",
        "first = _gather(slices[across.rank :: across.degree], across, tag)",
        "hierarchical gathers take the slices of another place in the node in their hop across nodes",
        near="zero/test_groups.py",
    ),
    "four-bytes-an-element": Mutant(
        "comm/shared_memory/transport.py",
        "self._copy(peer, place + start * mine.element_size(), blocks[peer])",
        "self._copy(peer, place + start * 4, blocks[peer])",
        "from the second block of a large 16-bit reduction on, a peer's memory is read at the wrong address",
    ),
    # optim: optimizers, schedules, the loss scale
    "options-of-the-first-group": Mutant(
        "optim/sharded.py",
        "group = self.param_groups[index]",
        "group = self.param_groups[0]",
        "on the CPU every param group is stepped with learning rate and weight decay of the first one",
        near="engine/test_optimizers.py",
    ),
    "scale-forgets-overflow-on-resume": Mutant(
        "optim/loss_scale.py",
        'self.step, self.last_overflow = int(state["step"]), int(state["last_overflow"])',
        'self.step, self.last_overflow = int(state["step"]), -1',
        "a resumed fp16 run doubles its loss scale at other steps than one that was not interrupted",
        near="engine/test_fp16.py engine/test_resume.py",
    ),
    "cosine-a-step-late": Mutant(
        "optim/curves.py",
        "done = (iteration - steps + 1) / max(1, params.total_num_steps - steps)",
        "done = (iteration - steps) / max(1, params.total_num_steps - steps)",
        "the cosine of WarmupCosineLR is one step late, and does not reach its end",
    ),
    "lamb-norms-of-slices": Mutant(
        "optim/lamb.py",
        "if flat.shards_optim:",
        "if flat.sharded:",
        "at stages 1 and 2 Lamb's trust ratio is that of the rank's slice",
    ),
    "adam-always-decoupled": Mutant(
        "optim/build.py",
        'name = "AdamW" if config.type == "Adam" and config.params.adam_w_mode else config.type',
        'name = "AdamW" if config.type == "Adam" else config.type',
        "adam_w_mode false is ignored: weight decay does not go through the moments",
        near="engine/test_optimizers.py optim",
    ),
    # checkpoint: files, and when they are written
    "latest-before-its-checkpoint": Mutant(
        "checkpoint/tags.py",
        "    os.rename(temporary, final)\n"
        "    sync_directory(directory)\n"
        "    if latest:\n"
        '        write_durably(directory / LATEST_FILE, tag + "\\n")\n',
        "    if latest:\n"
        '        write_durably(directory / LATEST_FILE, tag + "\\n")\n'
        "    os.rename(temporary, final)\n"
        "    sync_directory(directory)\n",
        "a save that is killed before the rename leaves a `latest` that names no checkpoint",
        near="checkpoint engine/test_killed_save.py engine/test_saving.py",
    ),
    "checksum-is-not-looked-at": Mutant(
        "checkpoint/reader.py",
        "        if damaged := archive.testzip():\n"
        '            raise ValueError(f"the checksum of {damaged} at byte {info.offset} is wrong")\n',
        "        archive.infolist()\n",
        "a checkpoint with a damaged byte is loaded without a word",
    ),
    "background-save-of-live-tensors": Mutant(
        "checkpoint/snapshot.py",
        "        memory.copy_(source)\n",
        "        memory = source.cpu()\n",
        "a save in the background writes weights and moments that training changes meanwhile",
        near="engine/test_saving.py",
    ),
    "step-that-does-not-wait-for-the-copy": Mutant(
        "engine/core.py",
        "                self.wait_for_copies()\n",
        "",
        "a recipe's save in the background has weights and moments of two steps",
        near="engine/test_saving.py",
    ),
    "named-checkpoints-are-deleted": Mutant(
        "checkpoint/retention.py",
        "_OF_STEP.fullmatch(tag)",
        're.search(r"(\\d+)", tag)',
        "keep_last deletes checkpoints that somebody has named, such as best_at_step_5",
        near="checkpoint",
    ),
    "replicas-forget-a-step-that-one-has-made": Mutant(
        "cluster/membership.py",
        '"makes_step": question.kind != "fresh" and question.step < step,',
        '"makes_step": False,',
        "with fault_tolerance a replica that dies at the end of a step leaves the others with different weights",
        near="cluster/test_membership.py",
    ),
    "replicas-count-alike-whatever-they-have-read": Mutant(
        "replica_run.py",
        "weight = float(mine[2]) / total if total else 1 / len(tokens)",
        "weight = 1 / len(tokens)",
        "with fault_tolerance replicas with fewer tokens count as much as others",
        near="cluster/test_replicas.py",
    ),
    "copies-stay-on-their-own-node": Mutant(
        "checkpoint/peer_memory.py",
        "following = self._nodes[(number + 1) % len(self._nodes)]",
        "following = self._nodes[number]",
        "with checkpoint.peer_memory the copies of a node that is lost are lost with it",
        near="checkpoint/test_peer_memory.py",
    ),
    "copies-are-used-without-a-look-at-their-bytes": Mutant(
        "checkpoint/peer_memory.py",
        "        check_blocks(place, {name: stamp})\n    except",
        "    except",
        "with checkpoint.peer_memory a run goes on from a damaged copy",
        near="checkpoint/test_peer_memory.py",
    ),
    "replicas-are-compared-by-rounded-sums": Mutant(
        "zero/features/replicas.py",
        "    return flat.view(torch.int64 if wide else _WHOLE[size])\n",
        "    return flat.float().mul(1000).to(torch.int64)\n",
        "a flipped bit that changes little goes unnoticed",
        near="zero/test_replicas.py",
    ),
    "waits-count-as-work": Mutant(
        "monitor/stragglers.py",
        '            - getattr(end, f"{phase}_wait")\n            + getattr(begin, f"{phase}_wait")\n',
        "",
        "nobody is slow: those who wait for a slow rank take as long as it does",
        near="monitor/test_stragglers.py",
    ),
    "fp32-in-the-stored-dtype": Mutant(
        "checkpoint/fp32.py",
        'return torch.float32 if name.startswith("model/") and stored.is_floating_point else stored',
        "return stored",
        "zero_to_fp32 gives parameters without fp32 master weights (frozen ones) in bf16",
        near="checkpoint engine/test_export.py",
    ),
    # engine: the step, and its state in checkpoints
    "schedule-moves-on-overflow": Mutant(
        "engine/core.py",
        "if not overflow and self.lr_scheduler is not None:",
        "if self.lr_scheduler is not None:",
        "the learning-rate schedule moves on at steps that are skipped because of an overflow",
        near="engine/test_fp16.py",
    ),
    "clips-the-undivided-norm": Mutant(
        "engine/core.py",
        "self.clipping.take_coefficient(norm) / self.gradient_divisor()",
        "self.clipping.take_coefficient(norm * self.gradient_divisor()) / self.gradient_divisor()",
        "clipping takes the norm of the sum over ranks, times the loss scale, for that of the gradient",
    ),
    "random-state-of-dp-rank-0": Mutant(
        "engine/state.py",
        'place = f"{rank}/stage{stage}" if stage else str(rank)',
        'place = f"{rank}/stage{stage}" if stage else "0"',
        "after a load all data-parallel ranks draw the random numbers of rank 0",
        near="engine/test_resume.py",
    ),
    "adam-counts-anew": Mutant(
        "engine/state.py",
        'if kind not in ("optimizer", "scalar", "number") or name not in slices:',
        'if kind not in ("optimizer", "number") or name not in slices:',
        "the step count of Adam is not restored: a resumed run corrects its moments as at the first step",
        near="engine/test_resume.py",
    ),
    "stages-forget-the-loss-scale": Mutant(
        "engine/executor.py",
        "return self.weights[microbatch] * updates * self.engine.loss_scaler.scale",
        "return self.weights[microbatch] * updates",
        "in pipeline stages the loss is not scaled, and fp16 gradients are divided by the scale all the same",
        near="pipeline engine/test_fp16.py",
    ),
    # offload: NVMe
    "stepped-early-and-again": Mutant(
        "optim/sharded.py",
        "            if gradient in self.early:\n                continue\n",
        "",
        "with states on NVMe, what was stepped inside the backward is stepped again, with zeros",
        near="zero/test_models.py optim engine/test_aids.py zero/test_parity.py",
    ),
    "tail-at-a-whole-block": Mutant(
        "offload/nvme.py",
        "yield IoRequest(self._file, extent.offset + start, data[start:end], write, label, seen)",
        "yield IoRequest(self._file, extent.offset + i * block, data[start:end], write, label, seen)",
        "what follows the last whole page of a tensor is written into the place of another tensor",
    ),
    "loaded-values-never-reach-the-disk": Mutant(
        "offload/offloaded.py",
        "whole.write_back() if self._changed else whole.discard()",
        "whole.discard()",
        "with shards on NVMe what is loaded from a checkpoint is dropped, and the disk has the old values",
    ),
    "directory-is-not-locked": Mutant(
        "scratch.py",
        "        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "the next rank or job takes the directory of a running one for a crashed one's, and removes it",
        near="attack/test_shared_disks.py",
    ),
    # tensor: layers split over tp
    "bias-on-every-rank": Mutant(
        "tensor/layers.py",
        "y = linear_of(self, x, biased=False)",
        "y = linear_of(self, x)",
        "the bias of a row-parallel layer is added on every rank before the sum, and once more after it",
    ),
    "sums-of-exponentials-with-own-maxima": Mutant(
        "tensor/loss.py",
        "total = (parts[:, 1] * (parts[:, 0] - largest).exp()).sum(0)",
        "total = parts[:, 1].sum(0)",
        "the cross entropy of split logits adds sums that each rank took relative to its own largest logit",
    ),
    "packed-as-one-matrix": Mutant(
        "tensor/apply.py",
        "packed = style.packed if rule.packed == (1,) else rule.packed",
        "packed = style.packed",
        "a fused q, k and v is cut in pieces as one matrix: rank 0 gets q and no v",
    ),
    "ranks-drop-the-same-out": Mutant(
        "tensor/dropout.py",
        "seed = (seed + self.axis.rank * _STEP) % _SEEDS",
        "seed = seed % _SEEDS",
        "where activations are split all tp ranks draw the same dropout masks",
    ),
    "held-twice-is-twice-as-large": Mutant(
        "tensor/split.py",
        "split.put(local, logical, first_only=True)",
        "split.put(local, logical)",
        "in exports, what some of the tp ranks hold together (key-value heads) is the sum of their copies",
        near="tensor",
    ),
    # pipeline: schedules, stages, asynchronous weights
    "last-weight-gradient-is-left-out": Mutant(
        "pipeline/schedules/synchronous.py",
        "made.extend((ActionKind.WEIGHT, slot) for slot in backwards[weights:])",
        "made.extend((ActionKind.WEIGHT, slot) for slot in backwards[weights:-1])",
        "with zb-h1 all stages but the first drop the weight gradients of the last microbatch",
    ),
    "last-group-of-layers-is-left-out": Mutant(
        "pipeline/sequential/stage.py",
        "for begin in range(0, len(self.calls), self.interval):",
        "for begin in range(0, len(self.calls) - self.interval + 1, self.interval):",
        "where activation_checkpoint_interval does not divide a stage's layers, training skips the last ones",
    ),
    "two-buffered-weights-are-the-newest": Mutant(
        "pipeline/executor/runtime.py",
        "return [updates - (schedule.delay or 0) for updates in weights_used(schedule)[rank]]",
        "return list(weights_used(schedule)[rank])",
        "2bw computes with the newest weights, not with those of one update before",
    ),
    "data-and-model-swapped": Mutant(
        "pipeline/sequential/topology.py",
        '["pipe", "data", "model"], [num_pp, num_dp, num_mp]',
        '["pipe", "data", "model"], [num_pp, num_mp, num_dp]',
        "PipeModelDataParallelTopology has the degrees of data and model the other way round",
        near="pipeline/test_topology.py",
    ),
    "weights-of-microbatches-reversed": Mutant(
        "engine/executor.py",
        "return self.weights[microbatch] * updates * self.engine.loss_scaler.scale",
        "return self.weights[-1 - microbatch] * updates * self.engine.loss_scaler.scale",
        "in stages, microbatches with different numbers of tokens count by those of another one",
        near="pipeline engine/test_accumulation.py",
    ),
    # models: initialization, recomputation
    "layers-begin-alike": Mutant(
        "models/initialize.py",
        'digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()',
        'digest = hashlib.sha256(f"{seed}".encode()).digest()',
        "all modules of a model on meta begin with the same random numbers",
    ),
    "recomputation-draws-anew": Mutant(
        "models/activation.py",
        "        if self.saved.keeping.changes_nothing:\n"
        "            return checkpoint(watched, *args, use_reentrant=False, **kwargs)\n",
        "        if self.saved.keeping.changes_nothing:\n"
        '            options = {**kwargs, "preserve_rng_state": False}\n'
        "            return checkpoint(watched, *args, use_reentrant=False, **options)\n",
        "a recomputed block drops other elements out than its forward did",
        near="models tensor/test_dropout.py",
    ),
    # data: caches, positions, labels
    "tokens-of-another-tokenizer": Mutant(
        "data/pack.py",
        "key = cache_key(FORMAT, dataset._fingerprint, fingerprint(tokenizer), seq_length)",
        "key = cache_key(FORMAT, dataset._fingerprint, tokenizer.name_or_path, seq_length)",
        "packed tokens are found again for another tokenizer of the same name",
    ),
    "place-of-the-step-before": Mutant(
        "data/loader.py",
        "            microbatches = self._microbatches() if self.reads else []\n"
        "            self._advance()\n"
        "            yield microbatches\n",
        "            yield self._microbatches() if self.reads else []\n            self._advance()\n",
        "a checkpoint has the place in the data before its last step, which a resumed run then does again",
        near="data engine/test_recipes.py",
    ),
    "packed-rows-learn-their-first-token": Mutant(
        "data/sft.py",
        "    labels[starts] = IGNORED\n",
        "",
        "in packed instruction rows the first token of each is learned from the last one of the row before",
    ),
    # config: the JSON
    "typos-below-a-known-key": Mutant(
        "config/check.py",
        "            else:\n                found += self.typos(child, member, here)\n        return found\n",
        "        return found\n",
        "unknown keys are accepted two levels inside of sections that only DeepSpeed has",
    ),
    "auto-of-zero": Mutant(
        "config/resolve.py",
        "if auto.get(name) is not None:",
        "if auto.get(name):",
        'an "auto" for which the run gives 0 (warmup_num_steps) gets the default of its key',
    ),
    "batch-equation-without-ranks": Mutant(
        "config/ranks.py",
        "if micro and accumulation and train == micro * accumulation * dp_degree:",
        "if micro and accumulation and train % (micro * accumulation) == 0:",
        "three batch sizes that contradict the number of ranks are accepted",
    ),
    "rules-on-open-keys": Mutant(
        "config/rules.py",
        "if not any(isinstance(value, str) and value == AUTO for value in values) and entry.stands(*values):",
        "if entry.stands(*values):",
        'an "auto" beside a number is compared with it, and a file that is right ends in a TypeError',
    ),
    # cluster: hosts, signals, failures
    "range-without-its-last-slot": Mutant(
        "cluster/hostfile.py",
        "found.update(range(int(match[1]), int(match[2] or match[1]) + 1))",
        "found.update(range(int(match[1]), int(match[2] or int(match[1]) + 1)))",
        "slots=0,2,5-7 has no slot 7",
    ),
    "exclude-keeps-single-slots": Mutant(
        "cluster/selection.py",
        "chosen = [replace(host, slots=tuple(sorted(left[host.name]))) for host in hosts if left[host.name]]",
        "chosen = [host for host in hosts if left[host.name]]",
        "--exclude node:1 excludes nothing, unless the whole host is named",
    ),
    "sigterm-stays-at-the-front-end": Mutant(
        "cluster/attempt.py",
        '        self.node_group.tell(self.node_group.nodes, "signal", number=int(signal.SIGTERM))\n',
        "",
        "with --term_grace no rank hears of a SIGTERM, so none saves a checkpoint in the time that it has",
    ),
    "lowest-rank-is-to-blame": Mutant(
        "cluster/failure.py",
        "rank = min(times, key=lambda candidate: (times[candidate], candidate))",
        "rank = min(times)",
        "of several ranks that failed the lowest is named, with its exit code, not the one that was first",
    ),
    "a-replay-goes-on-counting": Mutant(
        "engine/bit_checks.py",
        "                forget()\n",
        "                pass\n",
        "a step that is computed again counts its tokens on top of those of the first time",
        near="experts/test_balance.py",
    ),
    "any-write-is-a-fault": Mutant(
        "zero/features/resting.py",
        "old[:2] == new[:2] and old[2] != new[2]",
        "old[2] != new[2]",
        "what a script writes between two steps is taken for a fault of the memory",
        near="zero/test_bits.py",
    ),
    # cli, train: the course of a run
    "local-rank-all-the-same": Mutant(
        "cli/shares.py",
        "append_local_rank=not (run.is_ours or flags.no_local_rank),",
        "append_local_rank=not run.is_ours,",
        "--no_local_rank is ignored",
    ),
    "counts-the-first-label": Mutant(
        "engine/token_weights.py",
        "labels[:, 1:] if shifted is None",
        "labels[:, :-1] if shifted is None",
        "microbatches count by their labels but the last, not but the first, which nothing predicts",
        near="engine/test_token_weights.py",
    ),
    # monitor, estimate, plan: reported numbers
    "resumed-metrics-lack-a-step": Mutant(
        "monitor/metrics.py",
        'kept = [record for record in old if record["step"] <= step]',
        'kept = [record for record in old if record["step"] < step]',
        "metrics.jsonl of a resumed run lacks the step that it resumed from",
        near="monitor engine/test_recipes.py",
    ),
    "states-of-four-bytes": Mutant(
        "estimate/states.py",
        "return self.once + numel * sum(dtype.itemsize for dtype in self.dtypes.values())",
        "return self.once + 4 * numel * len(self.dtypes)",
        "the memory estimate takes optimizer states in bf16 for fp32",
    ),
    "higher-stages-are-hungrier": Mutant(
        "plan/choose.py",
        "return way.micro, -way.stage, -int(way.recompute), -OFFLOADS.index(way.offload)",
        "return way.micro, way.stage, -int(way.recompute), -OFFLOADS.index(way.offload)",
        "where one ZeRO stage is too large, the plan leaves the higher ones out, which would fit",
    ),
}
