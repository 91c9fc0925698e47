"""All that a run imports late, imported once by the process that the ranks of tests/train/ranks.py are forked from."""

import gc

from ssscale.data.streaming_patches import import_streaming

import_streaming()

import deepspeed.comm.mori
import deepspeed.comm.torch
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import rich.console  # noqa: F401
import ssscale_kernels.softmax
import ssscale_kernels.stickbreaking  # noqa: F401
import streaming.base.format.mds.reader  # noqa: F401
import torch._dynamo  # by torch.optim
import torch.utils.tensorboard  # noqa: F401
import transformers  # noqa: F401

import launch.pretrain  # noqa: F401
import ssscale.engine.deepspeed
import ssscale.train.loop
import ssscale.train.pretrain  # noqa: F401

# DeepSpeed collects garbage many times in each start: what is imported here need not be looked through again.
gc.collect()
gc.freeze()
