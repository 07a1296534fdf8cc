"""Read other tools' checkpoints in diffusers' terms.

names.py        the authors' names of Wan's modules, and diffusers'
files.py        find the files of a source
lazy.py         open files of tensors without reading them
lora.py         read a LoRA file
lycoris.py      the products of a LoKr and a LoHa
peft_config.py  the strength of a LoRA that PEFT trained
whole.py        read a whole model's file
scaled.py       weights in 8 bits with scales
recognise.py    recognise how a checkpoint was distilled
"""
