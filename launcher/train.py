"""The training loop of the recipes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm import all_reduce, log_summary
from launcher.comm.plain import gather_plain
from launcher.data.identity import Identity
from launcher.data.loader import GlobalBatchLoader
from launcher.data.tokenizer import save_tokenizer
from launcher.data.vocabulary import check_vocabulary
from launcher.engine import Engine, report
from launcher.engine.documents import POSITIONS, check_kept_apart, for_attention
from launcher.engine.token_weights import learned_tokens, token_weights
from launcher.errors import ConfigError
from launcher.experts.load import ExpertLoad
from launcher.models.adapters import TrainedAdapters
from launcher.monitor.memory import StepMemory, peak_memory_bytes
from launcher.monitor.metrics import METRICS, read_metrics
from launcher.monitor.plot import plot_loss
from launcher.monitor.summary import RankMemory, print_summary, write_summary
from launcher.monitor.trace import Trace
from launcher.optim.loss_scale import LossScaleExhausted
from launcher.pipeline.timeline.recording import TIMELINE
from launcher.recipe_state import RecipeState
from launcher.run import Run
from launcher.training_log import TrainingLog

if TYPE_CHECKING:
    from launcher.replica_run import ReplicaRun


@dataclass
class Training:
    """Trains an engine on a data set, and writes the results of the run.

    Args:
        run: flags and output directory.
        engine: from launcher.initialize().
        train_set, eval_set: items are LongTensors [seq_length], or dicts with input_ids and labels.
        total_steps: optimizer steps of the whole run; with `--resume` it includes the earlier steps.
        name: the model's name, for display.
        tokenizer: saved next to the final weights.
        adapters: the adapters that are trained; None: the whole model is.
    """

    run: Run
    engine: Engine
    train_set: Any
    eval_set: Any
    total_steps: int
    name: str
    tokenizer: Any = None
    adapters: TrainedAdapters | None = None
    loader: GlobalBatchLoader = field(init=False)
    state: RecipeState = field(init=False)
    expert_load: ExpertLoad = field(init=False)
    width: int = field(init=False)  # tokens per sequence, before a curriculum
    stalled_s: float = field(default=0.0, init=False)  # seconds reported so far
    replica: ReplicaRun | None = field(default=None, init=False)  # with several replicas (`fault_tolerance`)
    memory: StepMemory = field(init=False)

    def __post_init__(self) -> None:
        engine = self.engine
        engine.quiet = True
        self.memory = StepMemory(engine.device)
        self.loader = GlobalBatchLoader(
            self.train_set,
            global_batch=engine.train_batch_size() * self.run.replicas,
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            dp_rank=self.run.replica * engine.mesh.dp.degree + engine.mesh.dp.rank,
            dp_degree=engine.mesh.dp.degree * self.run.replicas,
            seed=self.run.args.seed,
            reads=engine.is_first_stage(),
        )
        section = engine.resolved.expert_parallel
        self.expert_load = ExpertLoad(
            engine.module, engine.mesh, section.capacity_factor or 0.0, section.degree
        )
        engine.zero.callbacks.before_replay.append(self.expert_load.forget)
        config: Any = engine.module.config
        for data in (self.train_set, self.eval_set):
            check_vocabulary(data, config.get_text_config().vocab_size)
        row = collate([self.train_set[0]])
        self.width = row["input_ids"].shape[1]
        identity = Identity.of(self.train_set, self.run.args.seed)
        self.state = RecipeState(
            self.run,
            engine,
            self.loader,
            identity,
            self.total_steps,
            self.tokenizer,
            self.width,
            self.adapters,
        )
        self._check_length()
        if POSITIONS in row:
            check_kept_apart(engine, engine.train_micro_batch_size_per_gpu(), self.width)

    def _check_length(self) -> None:
        """Check, before training, for settings that would end the run early."""
        engine = self.engine
        last = getattr(engine.lr_scheduler, "total_steps", None)
        if isinstance(last, int) and self.total_steps > last:
            raise ConfigError(
                f"the schedule ends after {last} optimizer steps, but the run has {self.total_steps}",
                where="scheduler.params.total_steps",
                fix=f'set it to {self.total_steps} or "auto"',
            )
        sampling = engine.resolved.data_efficiency.sampling
        if sampling and self.total_steps > sampling.num_epochs * self.loader.steps_per_epoch:
            passes = self.total_steps / self.loader.steps_per_epoch
            raise ConfigError(
                f"{self.total_steps} steps need {passes:.1f} passes over the data, but num_epochs is "
                f"{sampling.num_epochs}",
                where="data_efficiency.data_sampling.num_epochs",
                fix="increase it, or train fewer steps: --max-steps, --epochs",
            )

    def fit(self) -> None:
        """Train to the last step, evaluating and saving along the way, and write the results at the end."""
        self.run.take_over()  # after loading: a run that fails to start must not replace anything
        if self.run.replicas == 1:
            self.state.resume()
        elif not self._join():
            return
        self.run.write_config(self.engine.config)
        log = TrainingLog(self.run, self.engine, self.total_steps, self.width)
        if self.run.rank == 0 and self._leads:
            log.open(self.engine.global_steps)
        steps = self.loader.steps()
        self.engine.telemetry.say = log.say
        with log, self._trace() as trace:
            while self.engine.global_steps < self.total_steps and not self.state.diverged:
                self.run.check_ownership()
                if self.replica is not None:
                    self.replica.admit(self.state.client_state)
                place = self.loader.state_dict()
                try:
                    with trace.step(self.engine.global_steps + 1), self.memory.step():
                        record = self._step(next(steps))
                except LossScaleExhausted as error:
                    self.loader.load_state_dict(place)
                    if self._leads:
                        self.state.save_last(error)
                    raise
                if self._due(self.run.args.eval_every) and self.eval_set is not None:
                    record["eval_loss"] = self.evaluate()
                log.note(record, leads=self._leads)
                if self._due(self.run.args.save_every) and self._leads:
                    self.state.save()
                elif self.run.memory is not None and self._due(self.run.config.checkpoint.peer_memory.every):
                    self.state.keep()
                if self._stops():
                    self._save_and_leave()
        log.close()
        if self.replica is None:
            self._finish()
        elif self.replica.group.end():
            self._finish()
            self.replica.group.written()
        else:
            self._leave()

    def _join(self) -> bool:
        """Join the training replicas. Return False if they have already completed all steps."""
        from launcher.cluster.replica_group import RunIsOver
        from launcher.replica_run import ReplicaRun

        self.replica = ReplicaRun(self.engine)
        self.state.choose_background()
        try:
            self.replica.join(self._begin, self._take_state, self.run.say)
        except RunIsOver:
            self.run.say("the run has already finished; this replica does not join")
            self._leave()
            return False
        return True

    def _begin(self) -> None:
        """Start all replicas from the latest checkpoint, when none is training yet."""
        self.run.look_again()
        self.state.resume()

    def _take_state(self, client: dict[str, Any]) -> None:
        self.loader.load_state_dict(client["data"])
        self.state.tokens = client["tokens"]

    @property
    def _leads(self) -> bool:
        """Return whether this replica saves checkpoints and writes metrics."""
        return self.replica is None or self.replica.group.leads

    def _stops(self) -> bool:
        """Return whether any rank received SIGTERM. Every rank must call it."""
        return self.replica.told.stops if self.replica is not None else self.run.stop_requested()

    def _save_and_leave(self) -> None:
        saved = not self._leads or self.state.save()
        self.engine.saver.wait()
        how = "saved after" if saved else "stopped without saving after"
        self.engine.telemetry.say(f"SIGTERM: {how} step {self.engine.global_steps}")
        raise SystemExit(0 if saved else 1)

    def _trace(self) -> Trace:
        args, device = self.run.args, self.engine.device
        return Trace(args.profile, rank=self.run.rank, steps=args.profile_steps, cuda=device.type == "cuda")

    # ---- one step ---------------------------------------------------------------------------

    def _step(self, microbatches: list[dict[str, Tensor]]) -> dict[str, Any]:
        engine, began = self.engine, time.perf_counter()
        lr, seqlen = engine.lr, engine.curriculum_seqlen()
        # Cut before counting tokens: the loss is the mean over the remaining ones.
        cut = [engine.curriculum.cut(batch, engine.global_steps) for batch in microbatches]
        microbatches = [for_attention(engine, batch) for batch in cut]
        # Weight microbatches by their tokens, so that the loss is the mean over all tokens of the global
        # batch.
        weights = token_weights(engine, [learned_tokens(batch) for batch in microbatches])
        engine.train()
        loss = self._summed(engine.train_microbatches(microbatches, weights)) / engine.dp_world_size
        if self.replica is not None:
            learned = sum(learned_tokens(batch) for batch in microbatches)
            self.replica.begin_step(float(loss), learned, stops=bool(self.run.terminated))
        engine.step()
        mean_loss, replicas = float(loss), 1  # not before: the step is queued while the device computes
        if self.replica is not None:
            mean_loss, replicas = self.replica.told.loss, self.replica.told.members
        seen = engine.train_batch_size() * replicas * min(seqlen or self.width, self.width)
        self.state.tokens += seen
        norm = engine.get_global_grad_norm()
        self.state.look(mean_loss, norm)
        seconds = time.perf_counter() - began
        record: dict[str, Any] = {
            "step": engine.global_steps,
            "loss": mean_loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": self.state.tokens,
            "tokens_per_s": seen / seconds,
            "step_time_s": seconds,
        }
        if self.replica is not None:
            record["replicas"] = replicas
        record |= self.expert_load.take()
        if (stalled := engine.saver.stalled_s) > self.stalled_s:
            record["checkpoint_stall_s"], self.stalled_s = stalled - self.stalled_s, stalled
        if seqlen is not None:
            record["seqlen"] = seqlen
        if engine.fp16_enabled() or engine.loss_scaler.dynamic:  # also float16 under torch_autocast
            record |= {"loss_scale": engine.loss_scale(), "skipped_steps": engine.skipped_steps}
        if engine.timers.enabled:
            record["phases_ms"] = engine.get_wall_clock_timers()
        return record

    def _sum(self, value: float) -> float:
        return float(self._summed(torch.tensor(value, dtype=torch.float64)))

    def _summed(self, value: Tensor) -> Tensor:
        """Return the sum over dp, fp64 [], without synchronizing with the device."""
        total = value.to(self.engine.device, torch.float64, copy=True)
        all_reduce(total, self.engine.mesh.dp, "root/metrics").wait()
        return total

    def _due(self, every: int | None) -> bool:
        return every is not None and every > 0 and self.engine.global_steps % every == 0

    @torch.no_grad()
    def evaluate(self, most_batches: int = 32) -> float:
        """Return the token-weighted mean loss on the first sequences of the eval set, on any topology."""
        engine = self.engine
        self.state.collect_garbage()
        engine.eval()
        micro, axis = engine.train_micro_batch_size_per_gpu(), engine.mesh.dp
        rows = min(len(self.eval_set), most_batches * micro)
        batches, counts = [], []
        for start in range(0, -(-rows // (micro * axis.degree))) if engine.is_first_stage() else ():
            # All ranks must run the same number of forwards: under ZeRO-3 each one has collectives.
            first = (start * axis.degree + axis.rank) * micro
            chosen = [i for i in range(first, first + micro) if i < rows]
            batches.append(for_attention(engine, collate([self.eval_set[i] for i in chosen or [0]])))
            counts.append(learned_tokens(batches[-1]) if chosen else 0)
        loss = engine.eval_microbatches(batches, token_weights(engine, counts))
        engine.train()
        mean = self._sum(loss) / engine.dp_world_size
        engine.telemetry.evaluated(engine, mean)
        return mean

    def _finish(self) -> None:
        self.engine.saver.wait()  # so that an error names the last checkpoint
        output, failure = self.run.output_dir, None if self.state.is_sound() else self.state.failure()
        if failure is None:
            if self.engine.global_steps and not self._due(self.run.args.save_every):
                self.state.save()
            self._export()
        self.engine.saver.wait()
        ranks, parameters = self._memory(), report.parameters(self.engine)
        pipeline = report.last_step(self.engine, output / TIMELINE if self.run.rank == 0 else None)
        if self.run.rank == 0:
            if failure is None and self.tokenizer is not None:
                save_tokenizer(self.tokenizer, self.run.model_dir)
            more = {"pipeline": pipeline} if pipeline else {}
            self._write_summary(ranks, parameters, {**more, **({"stopped": failure.what} if failure else {})})
        if self.engine.resolved.comms_logger.enabled:
            log_summary()
        self._leave()
        if failure is not None:
            raise failure

    def _export(self) -> None:
        """Write the final weights, or the adapters alone. Every rank must call it."""
        if self.adapters is None:
            self.engine.save_16bit_model(self.run.model_dir)
            return
        from launcher.engine.adapter_files import export_adapters

        export_adapters(self.engine, self.run.model_dir, self.adapters.base)

    def _leave(self) -> None:
        self.engine.telemetry.close()
        dist.barrier()
        self.run.give_back()

    def _memory(self) -> list[RankMemory]:
        held = self.engine.held_bytes()
        mine = RankMemory(
            rank=self.run.rank,
            coordinates={name: axis.rank for name, axis in self.engine.mesh.axes.items() if axis.degree > 1},
            peak_memory_bytes=peak_memory_bytes(self.engine.device),
            parameter_bytes=held["parameters"],
            gradient_bytes=held["gradients"],
            optimizer_bytes=held["optimizer"] + held["master"],
            step_bytes=self.memory.step_bytes,
        )
        return [RankMemory(**each) for each in gather_plain(asdict(mine))]

    def _write_summary(self, ranks: list[RankMemory], parameters: int, more: dict[str, Any]) -> None:
        from launcher.estimate.beside_run import estimate_of_run

        output, engine = self.run.output_dir, self.engine
        metrics = output / METRICS
        stage = engine.zero_optimization_stage()
        summary = write_summary(
            output / "summary.json",
            world_size=engine.world_size,
            degrees={**engine.mesh.degrees, "ep": engine.resolved.expert_parallel.degree},
            model=self.name,
            parameters=parameters,
            records=read_metrics(metrics),
            ranks=ranks,
            estimate=estimate_of_run(
                engine.module.config,
                engine.resolved,
                engine.world_size,
                self.width,
                None if self.adapters is None else self.adapters.settings,
                on_host=engine.device.type == "cpu",
            ),
            dynamic_loss_scale=engine.loss_scaler.dynamic,
            zero_stage=stage,
            device=str(engine.device),
            **more,
        )
        title = f"{self.name}, ZeRO stage {stage}, {engine.world_size} rank{'s' * (engine.world_size > 1)}"
        plot_loss(metrics, output / "loss.png", title=title)
        if self.expert_load.experts:
            self.expert_load.plot(output / "experts.png", title=f"tokens per expert: {title}")
        written = {
            "metrics": metrics,
            "summary": output / "summary.json",
            "config": output / "config.json",
            "loss curve": output / "loss.png",
            **({"expert load": output / "experts.png"} if self.expert_load.experts else {}),
            **({"schedule": output / TIMELINE} if "pipeline" in more else {}),
            "checkpoints": self.run.checkpoints,
            **({} if "stopped" in more else {"adapters" if self.adapters else "model": self.run.model_dir}),
            "logs": output / "logs",
        }
        print_summary(summary, written, self.run.console)


def collate(items: Iterable[Tensor | dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack items of a data set into one microbatch."""
    rows = [item if isinstance(item, dict) else {"input_ids": item, "labels": item} for item in items]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


__all__ = ["Training", "collate"]
