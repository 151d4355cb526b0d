"""Metrics of a translation model in training and evaluation with `Seq2SeqTrainer`."""

from typing import Any

import numpy as np
from transformers import EvalPrediction, PreTrainedTokenizerBase

from .bleu import Bleu, check_tokenize
from .chrf import ChrF


class TranslationMetrics:
    """Score generated translations: `Seq2SeqTrainer(..., compute_metrics=TranslationMetrics(tokenizer))`.

    Needs `predict_with_generate=True`. Translations and references are decoded without special tokens and padding,
    which is the pad token, -100 in labels, or -100 where the trainer joins batches of different lengths.

    With several processes, transformers' trainer repeats the first rows to fill the last batch, and keeps them in the
    predictions; give `num_examples` to leave them out.

    The references are decoded labels, so truncated text and anything that the tokenizer changes (such as case) is
    missing in them. Compute scores for publication from the reference file.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the target language.
        tokenize (`str`, *optional*, defaults to `"13a"`): sacreBLEU's tokenizer for BLEU: `"13a"`, `"zh"`, `"none"`,
            `"char"`, `"intl"`, or one that needs a package, such as `"ja-mecab"`.
        lowercase (`bool`, *optional*, defaults to `False`): Whether to ignore case, in both scores.
        word_order (`int`, *optional*, defaults to 0): Longest word n-gram of chrF; 2 gives chrF++.
        num_examples (`int`, *optional*): Rows of the evaluation data; later rows are not scored.

    Raises:
        ValueError: if `tokenizer` has no pad token, or `tokenize` is unknown.
        ImportError: if `tokenize` needs a package that is not installed.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tokenize: str = "13a",
        lowercase: bool = False,
        word_order: int = 0,
        num_examples: int | None = None,
    ) -> None:
        check_tokenize(tokenize)
        if tokenizer.pad_token_id is None:
            raise ValueError("`tokenizer` must have a pad token, to replace -100 in arrays; got one without.")
        self.tokenizer = tokenizer
        self.num_examples = num_examples
        self.bleu_settings: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase}
        self.chrf_settings: dict[str, Any] = {"word_order": word_order, "lowercase": lowercase}

    def __call__(self, eval_prediction: EvalPrediction) -> dict[str, float]:
        """Compute the metrics of one evaluation.

        Args:
            eval_prediction (`EvalPrediction`): `predictions`, the generated ids of shape `(examples, tgt_len)`, or a
                tuple that starts with them; and `label_ids` of shape `(examples, label_len)`.

        Returns:
            `dict[str, float]`: `bleu` and `chrf` in percent, and `gen_len`, the mean number of tokens of a
            translation, without padding, start and end tokens.

        Raises:
            ValueError: if either is missing, is not an array of ids, or has fewer rows than `num_examples`.
        """
        predictions = eval_prediction.predictions
        if isinstance(predictions, tuple):
            predictions = predictions[0]
        generated = self._without_ignored("predictions", predictions)
        hypotheses = self.tokenizer.batch_decode(generated, skip_special_tokens=True)
        references = self.tokenizer.batch_decode(
            self._without_ignored("label_ids", eval_prediction.label_ids), skip_special_tokens=True
        )
        special_ids = [self.tokenizer.pad_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id]
        is_text = ~np.isin(generated, [token for token in special_ids if token is not None])
        bleu = Bleu().compute(predictions=hypotheses, references=references, **self.bleu_settings)
        chrf = ChrF().compute(predictions=hypotheses, references=references, **self.chrf_settings)
        return {"bleu": bleu["score"], "chrf": chrf["score"], "gen_len": float(is_text.sum(axis=1).mean())}

    def _without_ignored(self, name: str, ids: Any) -> np.ndarray:
        """Check ids, and replace negative ones by the pad token."""
        if ids is None:
            raise ValueError(f"`{name}` must be token ids, got None; give the evaluation data `labels`.")
        ids = np.asarray(ids)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"`{name}` must be token ids of shape (examples, length), got {ids.dtype} of shape {ids.shape}; "
                "set `predict_with_generate=True` in the training arguments."
            )
        if len(ids) < (self.num_examples or 0):
            raise ValueError(f"`{name}` must have at least `num_examples` = {self.num_examples} rows, got {len(ids)}.")
        return np.where(ids < 0, self.tokenizer.pad_token_id, ids)[: self.num_examples]
