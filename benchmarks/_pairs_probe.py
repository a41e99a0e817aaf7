import sys, time, types
import jax, jax.numpy as jnp
from functools import partial
from xform import flex_attention
B,T,H,D = 768,768,4,64
ks = jax.random.split(jax.random.key(0),5)
q,k,v,ct = (jax.random.normal(x,(B,T,H,D),jnp.bfloat16) for x in ks[:4])
bias = jax.random.normal(ks[4],(H,T,T),jnp.bfloat16)
mod = lambda c,s,b,h,q,k: s+c[h,q,k]
def ours(det, moving=True):
    def f(q,k,v,c):
        c = c if moving else jax.lax.stop_gradient(c)
        return flex_attention(q,k,v,score_mod=partial(mod,c),deterministic=det,implementation="mosaic_gpu")
    return f
def tok(q,k,v,c):
    from tokamax import dot_product_attention
    return dot_product_attention(q,k,v,bias=c[None],implementation="mosaic_gpu")
for n in ("xprof","xprof.cli","xprof.cli.tools"):
    m=types.ModuleType(n); vars(m).update(__path__=[],get_kernel_stats_tool=None); sys.modules.setdefault(n,m)
calls={}; res={}
for name,f in dict(turns=ours(True), free=ours(False), tokamax=tok, turns_no_dbias=ours(True,False), free_no_dbias=ours(False,False)).items():
    try:
        o,b=jax.jit(lambda q,k,v,c: jax.vjp(f,q,k,v,c))(q,k,v,bias)
        c=jax.jit(lambda b,d:b(d)).lower(b,ct).compile()
        r=c(b,ct); jax.block_until_ready(r)
        res[name]=[jnp.asarray(x) for x in (r[0][:4],r[1][:4],r[2][:4],r[3])]
        print(name,"temp MB",c.memory_analysis().temp_size_in_bytes/1e6,flush=True)
        del r
        calls[name]=lambda c=c,b=b:c(b,ct)
    except Exception as e: print(name,type(e).__name__,str(e)[:300],flush=True)
T_={n:[] for n in calls}
for _ in range(5):
    for n,c in calls.items():
        c()[0].block_until_ready(); s=time.perf_counter()
        for _ in range(6): r=c()
        jax.block_until_ready(r); T_[n].append((time.perf_counter()-s)/6*1e3); del r
for n,t in T_.items(): print(n,f"{sorted(t)[2]:.2f} ms",flush=True)
nrm=lambda a,b: float(jnp.linalg.norm((a-b).astype(jnp.float32))/jnp.linalg.norm(b.astype(jnp.float32)))
for n in res:
    if n!="turns": print(n,"off turns by",[f"{nrm(a.astype(jnp.float32),b.astype(jnp.float32)):.1e}" for a,b in zip(res[n],res["turns"])])
