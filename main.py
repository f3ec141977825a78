"""Trains or evaluates an image classifier; see anp_jax/__main__.py.

python main.py --config=configs/resnet_anp.py:demo --workdir=runs/demo
python main.py --workdir=runs/demo --mode=evaluate
srun python main.py ...    # or mpirun, or see docs/clusters.md
"""

if __name__ == '__main__':
  from anp_jax import commands

  commands.train()
