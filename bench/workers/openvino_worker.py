"""OpenVINO GenAI's continuous batching, which reads the GGUF file itself. Argument: the file."""

from protocol import serve  # isort: skip (first: it keeps the output of engines out of the answers)

import sys

import numpy as np
import openvino as ov
import openvino_genai

scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = 4  # GiB
scheduler.max_num_batched_tokens = 512
scheduler.enable_prefix_caching = True
pipeline = openvino_genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU")


def generate(requests):
    configs = []
    for _, count in requests:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        configs.append(config)
    tensors = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in requests]
    return [result.m_generation_ids[0] for result in pipeline.generate(tensors, configs)]


serve(f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}", generate)
