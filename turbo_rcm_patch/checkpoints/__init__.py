"""Read other tools' checkpoints in diffusers' terms.

names.py        the authors' names of Wan's modules, and diffusers'
files.py        find the files of a source
lazy.py         open files of tensors without reading them
lora.py         read a LoRA file
peft_config.py  the strength of a LoRA that PEFT trained
whole.py        read a whole model's file
recognise.py    recognise how a checkpoint was distilled
"""
