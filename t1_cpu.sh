# The campaign, then the slow tests, on 16 cores.
export JAX_PLATFORMS=cpu CUDA_VISIBLE_DEVICES=
O=${OUT:-/tmp}
nice -n 5 timeout -k 5 500 python3 benchmarks/fault_campaign.py --faults 200 --at-once 10 --hang 12 >$O/campaign.log 2>&1
echo "campaign ended with $? at $SECONDS s" >>$O/campaign.log
nice -n 5 timeout -k 5 $((525 - SECONDS)) python3 -m pytest -n 14 -q -m slow -p no:cacheprovider -o filterwarnings=default \
  --durations 12 --tb short tests/examples/test_parallel.py tests/examples/test_stopping.py tests/examples/test_resume.py \
  tests/examples/test_lasting.py tests/examples/test_reading.py tests/train tests/examples/test_train.py \
  -k "not fp8 and not dtypes and not partitioner and not tokenizer" >$O/slow.log 2>&1
echo "slow tests ended with $? at $SECONDS s" >>$O/slow.log
