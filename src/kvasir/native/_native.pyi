"""
llama.cpp under Kvasir: models, vocabularies, contexts, memory, samplers and chat templates.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy
import numpy.typing


class Device:
    """A compute device that ggml can use."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def kind(self) -> str:
        """'cpu', 'gpu', 'igpu' or 'accel'."""

    @property
    def memory_free(self) -> int: ...

    @property
    def memory_total(self) -> int: ...

class GgufFacts:
    """What a GGUF file says of itself, read without its tensors."""

    @property
    def architecture(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def file_type(self) -> str: ...

    @property
    def n_tensors(self) -> int: ...

    @property
    def n_kv(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def block_count(self) -> int: ...

    @property
    def embedding_length(self) -> int: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

def llama_version() -> str:
    """llama.cpp's version."""

def build_info() -> dict[str, str]:
    """
    How this extension was built, and which CPU features ggml uses. `kernels` names our own attention's sources.
    """

def devices() -> list[Device]:
    """The compute devices this build sees."""

def supports() -> dict[str, bool]:
    """What this build can do."""

def check_gguf(path: str) -> GgufFacts:
    """
    Reads and checks a GGUF file's keys. Raises ModelNotFound or ModelLoadError.
    """

def json_schema_to_grammar(schema_json: str) -> str:
    """A GBNF grammar for a JSON schema. Raises BadSchema."""

def take_logs(timeout_s: float) -> list[tuple[int, str]]:
    """
    llama.cpp's log lines since the last call, as (logging level, text). Waits up to timeout_s for the first.
    """

SAMPLER_NAMES: list[str]

KV_TYPES: list[str]

class Vocab:
    """
    Text to tokens and back. Safe from any thread; keeps its model's weights alive.
    """

    @property
    def n_tokens(self) -> int: ...

    @property
    def kind(self) -> str:
        """'none', 'spm', 'bpe', 'wpm', 'ugm', 'rwkv', 'plamo2' or 'test'."""

    @property
    def add_bos(self) -> bool: ...

    @property
    def add_eos(self) -> bool: ...

    @property
    def add_sep(self) -> bool: ...

    @property
    def eog_tokens(self) -> list[int]:
        """Every token that ends a generation."""

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """
        Token ids of a text. add_special adds what the model wants at its ends; parse_special reads '<|im_start|>' and the like as one token.
        """

    def token_to_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless special=True."""

    def detokenize(self, tokens: Sequence[int], *, remove_special: bool = False, unparse_special: bool = False) -> bytes:
        """The bytes of a token list."""

    def text(self, token: int) -> str:
        """The token as the vocabulary spells it."""

    def score(self, token: int) -> float: ...

    def is_eog(self, token: int) -> bool: ...

    def is_control(self, token: int) -> bool: ...

    @property
    def bos(self) -> int | None: ...

    @property
    def eos(self) -> int | None: ...

    @property
    def eot(self) -> int | None: ...

    @property
    def sep(self) -> int | None: ...

    @property
    def nl(self) -> int | None: ...

    @property
    def pad(self) -> int | None: ...

    @property
    def mask(self) -> int | None: ...

    @property
    def fim_pre(self) -> int | None: ...

    @property
    def fim_suf(self) -> int | None: ...

    @property
    def fim_mid(self) -> int | None: ...

class Adapter:
    """A LoRA adapter loaded for one model, which it keeps alive."""

    @property
    def metadata(self) -> dict[str, str]: ...

    @property
    def closed(self) -> bool: ...

    def close(self) -> None: ...

class Model:
    """
    Weights from a GGUF file. Contexts and vocabularies made from it keep them alive after close().
    """

    @staticmethod
    def load(path: str, *, gpu_layers: int = -1, split_mode: str = 'layer', main_gpu: int = 0, tensor_split: Sequence[float] = [], devices: Sequence[str] = [], use_mmap: bool = True, use_mlock: bool = False, vocab_only: bool = False, check_tensors: bool = False, progress: Callable[[float], bool] | None = None) -> Model:
        """
        Loads a GGUF file. progress is called with 0.0 to 1.0; returning False stops. Raises ModelNotFound or ModelLoadError.
        """

    def close(self) -> None:
        """Lets go of the weights; harmless when closed already."""

    @property
    def closed(self) -> bool: ...

    @property
    def vocab(self) -> Vocab: ...

    def load_adapter(self, path: str) -> Adapter:
        """Loads a LoRA adapter for this model."""

    def chat_template(self, name: str | None = None) -> str | None:
        """
        The model's chat template, or its named variant such as 'tool_use'; None where it has none.
        """

    @property
    def metadata(self) -> dict[str, str]:
        """The file's scalar keys as text."""

    @property
    def description(self) -> str: ...

    @property
    def architecture(self) -> str: ...

    @property
    def file_type(self) -> str: ...

    @property
    def rope_type(self) -> str: ...

    @property
    def memory_kind(self) -> str:
        """'plain', 'window', 'recurrent', 'hybrid', or 'none' for encoders."""

    @property
    def n_params(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...

    @property
    def n_ctx_train(self) -> int: ...

    @property
    def n_embd(self) -> int: ...

    @property
    def n_embd_out(self) -> int: ...

    @property
    def n_layer(self) -> int: ...

    @property
    def n_head(self) -> int: ...

    @property
    def n_head_kv(self) -> int: ...

    @property
    def n_swa(self) -> int: ...

    @property
    def n_cls_out(self) -> int: ...

    @property
    def has_encoder(self) -> bool: ...

    @property
    def has_decoder(self) -> bool: ...

    @property
    def is_diffusion(self) -> bool: ...

    @property
    def vocab_only(self) -> bool: ...

class SamplerParams:
    """A sampler chain as a plain value; every field can be set."""

    def __init__(self) -> None: ...

    @property
    def seed(self) -> int: ...

    @seed.setter
    def seed(self, arg: int, /) -> None: ...

    @property
    def order(self) -> list[str]: ...

    @order.setter
    def order(self, arg: Sequence[str], /) -> None: ...

    @property
    def temperature(self) -> float: ...

    @temperature.setter
    def temperature(self, arg: float, /) -> None: ...

    @property
    def dynatemp_range(self) -> float: ...

    @dynatemp_range.setter
    def dynatemp_range(self, arg: float, /) -> None: ...

    @property
    def dynatemp_exponent(self) -> float: ...

    @dynatemp_exponent.setter
    def dynatemp_exponent(self, arg: float, /) -> None: ...

    @property
    def top_k(self) -> int: ...

    @top_k.setter
    def top_k(self, arg: int, /) -> None: ...

    @property
    def top_p(self) -> float: ...

    @top_p.setter
    def top_p(self, arg: float, /) -> None: ...

    @property
    def min_p(self) -> float: ...

    @min_p.setter
    def min_p(self, arg: float, /) -> None: ...

    @property
    def min_keep(self) -> int: ...

    @min_keep.setter
    def min_keep(self, arg: int, /) -> None: ...

    @property
    def typical_p(self) -> float: ...

    @typical_p.setter
    def typical_p(self, arg: float, /) -> None: ...

    @property
    def top_n_sigma(self) -> float: ...

    @top_n_sigma.setter
    def top_n_sigma(self, arg: float, /) -> None: ...

    @property
    def xtc_probability(self) -> float: ...

    @xtc_probability.setter
    def xtc_probability(self, arg: float, /) -> None: ...

    @property
    def xtc_threshold(self) -> float: ...

    @xtc_threshold.setter
    def xtc_threshold(self, arg: float, /) -> None: ...

    @property
    def penalty_last_n(self) -> int: ...

    @penalty_last_n.setter
    def penalty_last_n(self, arg: int, /) -> None: ...

    @property
    def repeat_penalty(self) -> float: ...

    @repeat_penalty.setter
    def repeat_penalty(self, arg: float, /) -> None: ...

    @property
    def frequency_penalty(self) -> float: ...

    @frequency_penalty.setter
    def frequency_penalty(self, arg: float, /) -> None: ...

    @property
    def presence_penalty(self) -> float: ...

    @presence_penalty.setter
    def presence_penalty(self, arg: float, /) -> None: ...

    @property
    def dry_multiplier(self) -> float: ...

    @dry_multiplier.setter
    def dry_multiplier(self, arg: float, /) -> None: ...

    @property
    def dry_base(self) -> float: ...

    @dry_base.setter
    def dry_base(self, arg: float, /) -> None: ...

    @property
    def dry_allowed_length(self) -> int: ...

    @dry_allowed_length.setter
    def dry_allowed_length(self, arg: int, /) -> None: ...

    @property
    def dry_penalty_last_n(self) -> int: ...

    @dry_penalty_last_n.setter
    def dry_penalty_last_n(self, arg: int, /) -> None: ...

    @property
    def dry_sequence_breakers(self) -> list[str]: ...

    @dry_sequence_breakers.setter
    def dry_sequence_breakers(self, arg: Sequence[str], /) -> None: ...

    @property
    def mirostat(self) -> int: ...

    @mirostat.setter
    def mirostat(self, arg: int, /) -> None: ...

    @property
    def mirostat_tau(self) -> float: ...

    @mirostat_tau.setter
    def mirostat_tau(self, arg: float, /) -> None: ...

    @property
    def mirostat_eta(self) -> float: ...

    @mirostat_eta.setter
    def mirostat_eta(self, arg: float, /) -> None: ...

    @property
    def adaptive_target(self) -> float: ...

    @adaptive_target.setter
    def adaptive_target(self, arg: float, /) -> None: ...

    @property
    def adaptive_decay(self) -> float: ...

    @adaptive_decay.setter
    def adaptive_decay(self, arg: float, /) -> None: ...

    @property
    def logit_bias(self) -> list[tuple[int, float]]: ...

    @logit_bias.setter
    def logit_bias(self, arg: Sequence[tuple[int, float]], /) -> None: ...

    @property
    def ignore_eos(self) -> bool: ...

    @ignore_eos.setter
    def ignore_eos(self, arg: bool, /) -> None: ...

    @property
    def grammar(self) -> str: ...

    @grammar.setter
    def grammar(self, arg: str, /) -> None: ...

    @property
    def grammar_root(self) -> str: ...

    @grammar_root.setter
    def grammar_root(self, arg: str, /) -> None: ...

    @property
    def grammar_lazy(self) -> bool: ...

    @grammar_lazy.setter
    def grammar_lazy(self, arg: bool, /) -> None: ...

    @property
    def grammar_trigger_patterns(self) -> list[str]: ...

    @grammar_trigger_patterns.setter
    def grammar_trigger_patterns(self, arg: Sequence[str], /) -> None: ...

    @property
    def grammar_trigger_tokens(self) -> list[int]: ...

    @grammar_trigger_tokens.setter
    def grammar_trigger_tokens(self, arg: Sequence[int], /) -> None: ...

    @property
    def grammar_prefill(self) -> list[int]: ...

    @grammar_prefill.setter
    def grammar_prefill(self, arg: Sequence[int], /) -> None: ...

    @property
    def reasoning_budget(self) -> int: ...

    @reasoning_budget.setter
    def reasoning_budget(self, arg: int, /) -> None: ...

    @property
    def reasoning_start(self) -> list[int]: ...

    @reasoning_start.setter
    def reasoning_start(self, arg: Sequence[int], /) -> None: ...

    @property
    def reasoning_ends(self) -> list[list[int]]: ...

    @reasoning_ends.setter
    def reasoning_ends(self, arg: Sequence[Sequence[int]], /) -> None: ...

    @property
    def reasoning_forced(self) -> list[int]: ...

    @reasoning_forced.setter
    def reasoning_forced(self, arg: Sequence[int], /) -> None: ...

    @property
    def reasoning_prefill(self) -> list[int]: ...

    @reasoning_prefill.setter
    def reasoning_prefill(self, arg: Sequence[int], /) -> None: ...

class Sampler:
    """One sequence's sampler chain. Draw i depends on (seed, i) alone."""

    def __init__(self, vocab: Vocab, params: SamplerParams) -> None: ...

    def sample(self, context: Context, row: int) -> int:
        """
        Picks a token for row `row` of the context's last step, and accepts it.
        """

    def accept(self, token: int, generated: bool = True) -> None:
        """
        Tells the chain of a token it did not sample; generated=False for prompt tokens, which move only the penalties.
        """

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Tells the chain of a whole prompt."""

    def reset(self) -> None:
        """Back to the state before the first token."""

    def clone(self) -> Sampler:
        """An independent copy with the same state."""

    def seek(self, index: int) -> None:
        """Sets the index of the next draw, to resume an interrupted generation."""

    @property
    def names(self) -> list[str]:
        """The chain as built, in order."""

    @property
    def seed(self) -> int: ...

    @property
    def n_draws(self) -> int: ...

class Row:
    """One sequence's part of a step: tokens at consecutive positions."""

    def __init__(self, seq: int, pos: int, tokens: Sequence[int], sampler: Sampler | None = None, logprobs: int | None = None, output: bool = False) -> None:
        """
        sampler: sample after the last token. logprobs: how many alternatives to report. output: keep the logits without a sampler.
        """

    @property
    def seq(self) -> int: ...

    @property
    def pos(self) -> int: ...

    @property
    def tokens(self) -> list[int]: ...

class TokenLogprobs:
    """
    Log probabilities of a sampled token and of the likeliest alternatives, before any sampler.
    """

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> list[tuple[int, float]]: ...

class Step:
    """What one step did. Lists have one entry per row."""

    @property
    def status(self) -> str:
        """'ok', 'no_room', 'aborted', 'bad_batch' or 'failed'."""

    @property
    def tokens(self) -> list[int | None]: ...

    @property
    def logprobs(self) -> list[TokenLogprobs | None]: ...

    @property
    def errors(self) -> list[str | None]:
        """Why a row could not be sampled, or None."""

    @property
    def decode_s(self) -> float: ...

    @property
    def sample_s(self) -> float: ...

class Context:
    """
    A model at work: KV memory for some sequences, and one decode a step. Keeps its model alive.
    """

    def __init__(self, model: Model, *, n_ctx: int = 0, n_batch: int = 512, n_ubatch: int = 512, n_seq_max: int = 1, threads: int = 0, threads_batch: int = 0, sample_threads: int = 0, poll: int = 50, kv_unified: bool = True, flash_attn: str = 'auto', type_k: str = 'f16', type_v: str = 'f16', swa_full: bool = True, offload_kqv: bool = True, op_offload: bool = True, embeddings: bool = False, pooling: str = 'model', attention: str = 'model', rope_scaling: str = 'model', rope_freq_base: float = 0.0, rope_freq_scale: float = 0.0, yarn_ext_factor: float = -1.0, yarn_attn_factor: float = -1.0, yarn_beta_fast: float = -1.0, yarn_beta_slow: float = -1.0, yarn_orig_ctx: int = 0, adapters: Sequence[tuple[Adapter, float]] = []) -> None: ...

    def close(self) -> None:
        """Frees the context; harmless when closed already."""

    @property
    def closed(self) -> bool: ...

    @property
    def model(self) -> Model:
        """The model it runs."""

    @property
    def memory(self) -> Memory: ...

    @property
    def n_ctx(self) -> int:
        """All cells."""

    @property
    def n_ctx_seq(self) -> int:
        """The most tokens one sequence can hold."""

    @property
    def n_batch(self) -> int: ...

    @property
    def n_ubatch(self) -> int: ...

    @property
    def n_seq_max(self) -> int: ...

    @property
    def kv_unified(self) -> bool: ...

    @property
    def pooling(self) -> str: ...

    @property
    def threads(self) -> int: ...

    @property
    def threads_batch(self) -> int: ...

    @property
    def n_rows_decoded(self) -> int:
        """Every token row this context ever decoded."""

    def step(self, rows: Sequence[Row]) -> Step:
        """
        One decode, then every row with a sampler is sampled, in parallel. Raises BadOption for what llama.cpp would abort on.
        """

    def logits(self, row: int) -> numpy.typing.NDArray[numpy.float32]:
        """A copy of the logits of row `row` of the last step."""

    def sample_stored(self, sampler: Sampler, logits: bytes, logprobs: int | None = None) -> Step:
        """
        Samples one row from the bytes of logits that an earlier step left, and decodes nothing.
        """

    def embed(self, texts: Sequence[Sequence[int]]) -> numpy.typing.NDArray[numpy.float32]:
        """
        One pooled vector a text (rank pooling: its scores), many texts a decode.
        """

    def embed_tokens(self, tokens: Sequence[int]) -> numpy.typing.NDArray[numpy.float32]:
        """One vector a token, for contexts with pooling='none'."""

    def set_threads(self, threads: int, threads_batch: int) -> None: ...

    def set_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """
        Uses these (adapter, scale) pairs from now on, in place of those before.
        """

    def abort(self) -> None:
        """
        From any thread: stops a running decode where that is safe (CPU; not recurrent or hybrid), otherwise the next.
        """

    def clear_abort(self) -> None: ...

    def synchronize(self) -> None: ...

class Memory:
    """
    A context's KV memory. Spans are half open, [p0, p1); p1=None means the end.
    """

    @property
    def kind(self) -> str:
        """'plain', 'window', 'recurrent', 'hybrid' or 'none'."""

    @property
    def window(self) -> int:
        """Tokens a sliding window spans, 0 without one."""

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved exactly."""

    @property
    def n_cells(self) -> int: ...

    @property
    def used_cells(self) -> int: ...

    def pos_min(self, seq: int) -> int | None:
        """The first position held, or None."""

    def pos_max(self, seq: int) -> int | None:
        """The last position held, or None."""

    def remove(self, seq: int, p0: int, p1: int | None) -> bool:
        """Drops a span. False: this memory cannot, and nothing changed."""

    def share(self, src: int, dst: int, n_tokens: int) -> bool:
        """
        Makes dst the first n_tokens of src. False: not possible exactly, and dst is empty.
        """

    def copy(self, src: int, dst: int) -> None:
        """Makes dst a copy of all of src."""

    def keep(self, seq: int) -> None:
        """Drops every other sequence."""

    def shift(self, seq: int, p0: int, p1: int | None, delta: int) -> None:
        """
        Moves a span's positions by delta, at once; shared cells are separated first. Raises Unsupported where it would be wrong.
        """

    def clear(self) -> None: ...

    def flush(self) -> None:
        """Applies what llama.cpp left pending."""

    def export_span(self, seq: int, p0: int, p1: int, part: str = 'base') -> bytes:
        """The KV of a span as bytes, the same in both layouts."""

    def import_span(self, seq: int, p0: int, payloads: Sequence[bytes], part: str = 'base') -> bool:
        """
        Appends exported spans at p0, which must be the sequence's end. False: no room, and nothing changed.
        """

    def state(self, seq: int, *, partial: bool = False) -> bytes:
        """
        llama.cpp's own state of a sequence; partial: only what cannot be rewound.
        """

    def set_state(self, seq: int, data: bytes, *, partial: bool = False) -> bool:
        """Restores state(). False: it failed, and the sequence is empty."""

def quantize(src: str, dst: str, *, to: str, threads: int = 0, progress: Callable[[float], bool] | None = None) -> None:
    """
    Writes a model's weights in another layout ('q8_0', 'q4_0', 'q4_k_m', 'f16', ...) to a new file. A split model becomes one file.

    progress is called with 0.0 to 1.0 between tensors; returning False stops. A failure leaves an unfinished dst behind.
    Raises BadOption, ModelNotFound or ModelLoadError.
    """

class ChatPrompt:
    """A rendered prompt, and what its reply will look like."""

    @property
    def prompt(self) -> str: ...

    @property
    def grammar(self) -> str: ...

    @property
    def grammar_lazy(self) -> bool: ...

    @property
    def grammar_triggers(self) -> list[tuple[str, str, int]]:
        """
        (kind, value, token or -1); the kinds are word, pattern, pattern_full and token.
        """

    @property
    def preserved_tokens(self) -> list[str]:
        """
        Special tokens that the parser must see as text, where they are one token of the vocabulary.
        """

    @property
    def stops(self) -> list[str]: ...

    @property
    def generation_prompt(self) -> str: ...

    @property
    def format(self) -> str: ...

    @property
    def thinking_start(self) -> str: ...

    @property
    def thinking_ends(self) -> list[str]: ...

    @property
    def supports_thinking(self) -> bool: ...

    def constrain(self, params: SamplerParams, vocab: Vocab) -> None:
        """
        Gives a sampler this prompt's grammar with its triggers, and the tokens of its thinking markers. A word that is one token triggers as that token. reasoning_budget stays as it is; reasoning_forced becomes the first end marker.
        """

class ChatTemplate:
    """How a model spells messages. Without a model it needs a source."""

    def __init__(self, model: Model | None = None, source: str = '', *, bos_token: str = '', eos_token: str = '') -> None: ...

    @property
    def explicit(self) -> bool:
        """
        False where the model brings no template and none was given: ChatML stands in for it.
        """

    @property
    def source(self) -> str: ...

    @property
    def caps(self) -> dict[str, bool]:
        """What the template can show: supports_tools, supports_tool_calls..."""

    def render(self, messages: str, *, tools: str = '', tool_choice: str = 'auto', parallel_tool_calls: bool = False, json_schema: str = '', enable_thinking: bool = True, add_generation_prompt: bool = True, continue_final: bool = False, kwargs: Mapping[str, str] = {}) -> ChatPrompt:
        """
        The prompt for messages and tools in OpenAI's shape, given as JSON text. Raises BadOption or BadSchema.
        """

class ChatDelta:
    """What a piece of a reply added: 'content', 'reasoning' or 'tool_call'."""

    @property
    def kind(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def index(self) -> int: ...

    @property
    def id(self) -> str: ...

    @property
    def name(self) -> str:
        """Set on the first delta of a call."""

class ChatParser:
    """
    Reads one reply as it comes. What it gave is never taken back, and it never raises.
    """

    def __init__(self, prompt: ChatPrompt, *, continues: bool = False) -> None: ...

    def feed(self, text: str) -> list[ChatDelta]:
        """Takes the text that came; what it makes certain."""

    def finish(self) -> list[ChatDelta]:
        """The rest, at the end of the reply."""

    @property
    def content(self) -> str: ...

    @property
    def reasoning(self) -> str: ...

    @property
    def tool_calls(self) -> list[tuple[str, str, str]]:
        """The calls so far: id, name, arguments as JSON text."""

    @property
    def rejected(self) -> bool:
        """
        Whether the reply left the expected form: from there on all text is content.
        """
