"""Generating text with the stages and ends of a decoder, without processes.

pages        which pages of the cache each sequence has
speculation  tokens that earlier text or a small model proposes, and how many of them pay
drafting     the small model
steps        which rows the next step has, within step_limits; groups deals sequences to steps
loop         all layers in one process
structure    a JSON schema, regular expression or grammar that an answer follows by structure_matching
sampling     the options of an answer, and the model's own (generation_config.json)
sampler      scores -> the next token
text_stream  tokens -> pieces of text, without half characters and stop strings
tools        functions that a model may call, and the calls in its answers
vocabulary   the tokenizer and its chat template
template     conversations -> text; template_program does it in a process that can only compute
prompt       texts, token ids and conversations -> prompts as tokens
generation   scores in, tokens and text out: one answer; answer_documents makes JSON of it

    read_generation_config -> Sampling ─┐
    text, messages ──> PromptMaker ─────┴─> Prompt ──> Generation.take(scores) -> Piece ... ──> answer()
"""
