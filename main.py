"""Trains or evaluates an image classifier; see anp_jax/__main__.py.

python main.py --config=configs/resnet_anp.py:demo --workdir=runs/demo
python main.py --workdir=runs/demo --mode=evaluate
srun python main.py ...    # or mpirun, or see docs/clusters.md
"""

from anp_jax.system import interrupts

if __name__ == '__main__':
  interrupts.install()  # all else takes time
  from anp_jax.system import xla_flags

  xla_flags.use_huge_pages()  # restarts, and would import all else twice

from anp_jax import __main__ as command_lib

main = command_lib.main

if __name__ == '__main__':
  command_lib.command()
