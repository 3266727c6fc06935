"""llama.cpp through llama-cpp-python's low-level interface. Argument: the GGUF file.

The loop of its server in Python: each step decodes one token of every running sequence and fills the batch with
prompts; a prefix that all prompts share is computed once and copied.
"""

from protocol import serve  # isort: skip (first: it keeps the output of engines out of the answers)

import os
import sys

import llama_cpp as lib
import numpy as np

BATCH = 512
MAX_SEQS = 128
CONTEXT = MAX_SEQS * 1280  # each sequence has its own part: with one for all, each would look at all of it

lib.llama_backend_init()
silence = lib.llama_log_callback(lambda *_: None)
lib.llama_log_set(silence, None)
model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
params = lib.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, BATCH, BATCH, MAX_SEQS
params.n_threads = params.n_threads_batch = os.cpu_count()
params.kv_unified = False
context = lib.llama_init_from_model(model, params)
memory = lib.llama_get_memory(context)
vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
batch = lib.llama_batch_init(BATCH, 0, 1)


def decode(entries):
    """Compute (token, position, sequence, whether logits are wanted) entries; returns the best next tokens."""
    for i, (token, position, seq, wanted) in enumerate(entries):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = seq
    batch.n_tokens = len(entries)
    assert lib.llama_decode(context, batch) == 0
    wanted = [i for i, entry in enumerate(entries) if entry[3]]
    return [int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), shape=(vocab,)).argmax()) for i in wanted]


def shared_prefix(requests):
    shortest = min(len(ids) for ids, _ in requests)
    first = requests[0][0]
    count = 0
    while count < shortest - 1 and all(ids[count] == first[count] for ids, _ in requests):
        count += 1
    return count if len(requests) > 1 else 0


def generate(requests):
    lib.llama_memory_clear(memory, True)
    shared = shared_prefix(requests)
    for start in range(0, shared, BATCH):
        part = requests[0][0][start : min(start + BATCH, shared)]
        decode([(token, start + i, 0, False) for i, token in enumerate(part)])
    outputs = [[] for _ in requests]
    waiting = list(range(len(requests)))[::-1]
    free = list(range(1, MAX_SEQS))[::-1]
    running = {}  # request → its sequence
    computed = {}  # request → tokens of the prompt that are computed
    while waiting or running:
        entries, owners = [], []
        for i, seq in running.items():
            ids = requests[i][0]
            if computed[i] == len(ids):
                entries.append((outputs[i][-1], len(ids) + len(outputs[i]) - 1, seq, True))
                owners.append(i)
        while len(entries) < BATCH:
            unfinished = next((i for i in running if computed[i] < len(requests[i][0])), None)
            if unfinished is None:
                if not waiting or not free:
                    break
                unfinished = waiting.pop()
                running[unfinished], computed[unfinished] = free.pop(), shared
                if shared:
                    lib.llama_memory_seq_cp(memory, 0, running[unfinished], -1, -1)
            ids, start = requests[unfinished][0], computed[unfinished]
            end = min(len(ids), start + BATCH - len(entries))
            for position in range(start, end):
                entries.append((ids[position], position, running[unfinished], position == len(ids) - 1))
            computed[unfinished] = end
            if end == len(ids):
                owners.append(unfinished)
        for i, token in zip(owners, decode(entries), strict=True):
            outputs[i].append(token)
            if len(outputs[i]) == requests[i][1]:
                lib.llama_memory_seq_rm(memory, running[i], -1, -1)
                free.append(running.pop(i))
    return outputs


serve(f"llama.cpp ({lib.__version__})", generate)
