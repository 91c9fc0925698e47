"""All that a run imports late, imported once by the process that the ranks of tests/train/ranks.py are forked from."""

import gc

from ssscale.data.torchvision_stand_in import install_stand_in

install_stand_in()

import deepspeed.comm.torch  # noqa: F401
import streaming.base.format.mds.reader  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import transformers  # noqa: F401

import ssscale.engine.deepspeed
import ssscale.train.loop
import ssscale.train.pretrain  # noqa: F401

# DeepSpeed collects garbage many times in each start: what is imported here need not be looked through again.
gc.collect()
gc.freeze()
