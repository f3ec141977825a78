"""Variables that launchers set, as their own documentation has them."""


def variables(text) -> dict[str, str]:
  """Reads 'NAME=value NAME=value'."""
  return dict(word.split('=', 1) for word in text.split())


# What srun sets for a task of a step over two nodes, 2 tasks on each.
STEP = variables("""
  SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=gpu[03-05,9],login SLURM_NNODES=5 SLURM_NTASKS=4
  SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[03-04] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4
  SLURM_PROCID=3 SLURM_LOCALID=1
""")
# What each of the others sets for process 2 of 4 on two hosts.
TORCHRUN = variables("""
  RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=gpu03 MASTER_PORT=29500
  TORCHELASTIC_RUN_ID=job7 TORCHELASTIC_RESTART_COUNT=0
""")
# Kubeflow's PyTorchJob, or a script that exports them: nobody listens yet.
EXPORTED = variables('RANK=2 WORLD_SIZE=4 MASTER_ADDR=job-master-0 MASTER_PORT=23456')
JAX = variables('JAX_COORDINATOR_ADDRESS=node1:1234 JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=2')
MPICH = variables('PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2')
PALS = variables("""
  PALS_RANKID=2 PALS_LOCAL_RANKID=0 PALS_LOCAL_SIZE=2 PALS_APID=a1 PMI_RANK=2 PMI_SIZE=4
""")
MVAPICH = variables("""
  MV2_COMM_WORLD_RANK=2 MV2_COMM_WORLD_SIZE=4
  MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=2
""")
# Open MPI 4; Open MPI 5 has no address of mpirun in the environment.
OPEN_MPI_4 = variables("""
  OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=2
  OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0
  OMPI_MCA_ess_base_jobid=1531576321 PMIX_NAMESPACE=1531576321
  OMPI_MCA_orte_hnp_uri=1531576320.0;tcp://10.96.0.1,172.17.0.1:34911
""")
OPEN_MPI = {k: v for k, v in OPEN_MPI_4.items() if not k.startswith('OMPI_MCA')}
TPU = variables("""
  TPU_WORKER_HOSTNAMES=t1k-w-0.svc,t1k-w-1.svc,t1k-w-2.svc TPU_WORKER_ID=1 TPU_NAME=t1k
""")
