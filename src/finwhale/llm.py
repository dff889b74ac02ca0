"""Generation from Python: the LLM class."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from finwhale.engine.loop import control
from finwhale.engine.loop.control import MemoryTag
from finwhale.engine.loop.weight_updates import WeightsSource
from finwhale.errors import RequestError
from finwhale.interrupts import interrupts_wait
from finwhale.loaded_model import LoadedModel, PreparedPrompt, add_job
from finwhale.progress_bars import token_bar
from finwhale.prompts import Messages, Prompt, plain_prompt
from finwhale.request import RequestOutput, Requests, SamplingParams
from finwhale.weights.group_defaults import GROUP_NAME, TIMEOUT_S, GroupBackend


class LLM(LoadedModel):
    """A model and an engine in this process; threads may share it, forked processes may not.

    Use it with `with`, or call `close` at the end; garbage collection frees the memory, too.

    On a CPU, it sets numpy's BLAS to one thread for the whole process (ops/cpu_math.py says why).

    Args:
        path: directory of a checkpoint, or the id of a repository on the Hugging Face Hub, which
            is downloaded unless the cache has it; None: the embedded model.
        model: the same as `path`, as in vLLM.
        revision: branch, tag or commit of the repository; None: its main branch.
        progress: called with (bytes read, total bytes) while weights load.

    The other arguments are the options of the engine; docs/options.md describes them.

    Raises:
        CheckpointError: the checkpoint is missing, broken or not a DeepSeek-V4 model.
        ResourceError: the device is missing or has too little memory.
        FinwhaleError: an option is out of range.
        TypeError: an option is unknown.
    """

    def close(self) -> None:
        """Ends all requests and frees the memory, whatever still refers to this object.

        Later calls raise FinwhaleError; closing again does nothing.
        """
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt. Returns one result for each prompt, in order.

        Args:
            prompts: texts, lists of token ids, or mappings such as {"prompt_token_ids": [...]}; a
                single prompt needs no list around it. The
                engine adds the beginning-of-sequence token before a text, but not before token ids.
            sampling_params: one for all prompts, or a list with one for each.
            show_progress: show a progress bar, if standard error is a terminal.

        If a prompt cannot be served (it is empty, too long, or has an id outside the vocabulary),
        its result has an `error` and the finish reason "error". The other prompts are served.

        Raises:
            RequestError: the number of sampling_params is not the number of prompts.
        """
        return self._run(self._prepared(prompts, sampling_params), show_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers each conversation. Returns one result for each conversation, in order.

        Args:
            messages: one conversation (a list of {"role": ..., "content": ...}) or several.
            sampling_params: one for all conversations, or a list with one for each.
            thinking: let the model think before it answers.
            tools: function tools as in OpenAI's Chat Completions. Calls hold their schemas only
                with tool_grammar="auto". A `strict` schema that cannot hold is then an error.
            show_progress: show a progress bar, if standard error is a terminal.

        Each output's `message` is the answer, parsed into content, reasoning_content and
        tool_calls. Stop strings end the content, not the reasoning or a tool call. If one of
        several conversations is malformed or too long, its result has an `error`, as in `generate`.

        Raises:
            RequestError: a single conversation is malformed or too long, `messages` has neither
                form, the checkpoint has no tokenizer, or stop strings come with options that
                answers do not support.
        """
        jobs = self._prepared_chats(messages, sampling_params, thinking, tools)
        return self._run(jobs, show_progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continues one prompt. Yields its result, always the same object, after each new token.

        Raises:
            RequestError: the prompt cannot be served.
        """
        engine = self._engine
        job = self._job(plain_prompt(prompt), sampling_params or SamplingParams())
        request_id = self._new_id()  # before it begins, so that an interrupt aborts it
        shown, finished = 0, False
        try:
            with interrupts_wait():
                result = add_job(engine, request_id, job)
            while not finished:
                with interrupts_wait():
                    engine.step()
                # Another thread's stream or batch may have stepped this request to its end.
                finished = result.finished
                made = sum(len(output.token_ids) for output in result.outputs)
                if made > shown or finished:
                    shown = made
                    yield result
        finally:
            with interrupts_wait():
                engine.abort(request_id)

    def update_weights(
        self, source: WeightsSource, *, partial: bool = False, requests: Requests = "recompute"
    ) -> None:
        """Replaces the weights (see docs/rollouts.md).

        The engine stages the new weights in host memory while other threads' requests continue.
        Between two steps, it then writes them in place and clears the prefix cache. If it raises,
        the old weights stay, except after an EngineDeadError.

        Args:
            source: the directory of a checkpoint of the same model; pairs of an official name and
                a tensor on any device, in any order (the iterable may reuse a tensor's memory for
                the next pair); BroadcastTensors; or SharedTensors.
            partial: accept some of the weights; the others stay. Weights that are packed into one
                tensor must be in the same update.
            requests: how to treat running requests. "recompute": the engine computes their tokens
                so far again. "keep": they continue with the cache of the old weights. "abort": they
                end with the finish reason "abort".

        Raises:
            CheckpointError: a tensor is missing, unknown, or has a wrong shape, dtype or value.
            ResourceError: the host has too little memory to stage the weights.
            FinwhaleError: a broadcast timed out. The engine has left the group.
            EngineDeadError: a rank failed, perhaps while it wrote the weights. Start a new engine.
        """
        self._updates.update(source, partial=partial, requests=requests)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        *,
        rank_offset: int = 1,
        world_size: int | None = None,
        group_name: str = GROUP_NAME,
        backend: GroupBackend | None = None,
        timeout_seconds: float = TIMEOUT_S,
    ) -> None:
        """Joins a process group over which a trainer, its rank 0, broadcasts weights.

        Blocks until all members have joined. Meanwhile the engine runs no step.

        Args:
            master_address: the host of the trainer's TCPStore.
            master_port: the port of this store.
            rank_offset: the first rank of this engine in the group.
            world_size: number of members; None: the trainer and this engine.
            backend: "nccl" or "gloo"; None: "nccl" on GPUs.
            timeout_seconds: time limit for this call, and for each broadcast.

        Raises:
            RequestError: an argument is wrong, or the engine is already in a group of this name.
            FinwhaleError: the members did not join in time.
        """
        self._updates.join(
            master_address,
            master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
            timeout_seconds=timeout_seconds,
        )

    def destroy_weights_update_group(self, group_name: str = GROUP_NAME) -> None:
        """Leaves a group. Raises RequestError if the engine is not in it."""
        self._updates.leave(group_name)

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Runs no more steps until `resume`; calls of other threads wait.

        Args:
            mode: "abort" ends all requests with the finish reason "abort".
        """
        control.pause(self._engine, mode)

    def resume(self) -> None:
        """Continues after `pause`."""
        control.resume(self._engine)

    def sleep(
        self,
        tags: Sequence[MemoryTag] = ("weights", "cache"),
        *,
        drop_weights: bool = False,
        requests: Literal["recompute", "abort"] = "recompute",
    ) -> None:
        """Frees memory until `wake`; needs enable_sleep_mode.

        A sleeping engine runs no steps and refuses new requests. The prefix cache is lost.

        Args:
            tags: "weights", "cache" or both.
            drop_weights: do not save the weights. After `wake`, the engine continues only after
                `update_weights` with all weights. Otherwise the weights are saved in host memory,
                or on a CPU in a temporary file.
            requests: how to treat running requests. "recompute": they wait, and the engine computes
                their tokens so far again. "abort": they end with the finish reason "abort".

        Raises:
            ResourceError: the host has too little memory to save a GPU's weights. The engine stays
                awake.
        """
        control.sleep(self._engine, tags, drop_weights=drop_weights, requests=requests)

    def wake(self, tags: Sequence[MemoryTag] = ("weights", "cache")) -> None:
        """Allocates memory again after `sleep`. The engine continues when it has all of it."""
        control.wake(self._engine, tags)

    def _run(
        self, jobs: Iterable[PreparedPrompt | RequestOutput], show_progress: bool
    ) -> list[RequestOutput]:
        """Begins the requests and runs them to their ends. An exception aborts all of them."""
        engine = self._engine
        begun: list[tuple[PreparedPrompt | None, RequestOutput]] = []
        ids: list[str] = []
        try:
            for job in jobs:
                if isinstance(job, RequestOutput):
                    begun.append((None, job))
                    continue
                ids.append(self._new_id())  # as in `stream`
                try:
                    with interrupts_wait():
                        begun.append((job, add_job(engine, ids[-1], job)))
                except RequestError as error:
                    begun.append((None, self._refused(error, job)))
            results = [result for _, result in begun]

            def read() -> tuple[int, int]:
                tokens = (len(output.token_ids) for one in results for output in one.outputs)
                return sum(result.finished for result in results), sum(tokens)

            with token_bar("prompts", len(results), read, show=show_progress) as update:
                while not all(result.finished for result in results):
                    with interrupts_wait():
                        engine.step()
                    update()
        finally:
            with interrupts_wait():
                for request_id in ids:
                    engine.abort(request_id)
        for accepted, result in begun:
            if accepted is not None:
                self._parse_answer(accepted, result)
        return results
