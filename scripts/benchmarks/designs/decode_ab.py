import statistics, sys, time, torch
sys.path.insert(0,'.')
import turbo_rcm_patch as trp
from scripts.benchmarks.memory_cap import with_random_weights
from turbo_rcm_patch.patching.families import CASES
from turbo_rcm_patch.latents import latent_size
from turbo_rcm_patch.kernels.conv import conv_pairs_sm90 as L
real=L.why_not
def off(*a): return "not for this test"
dev=torch.device('cuda')
for config in sys.argv[1:]:
    case=CASES[config]; t0=time.time()
    vae=with_random_weights(lambda: case.vae_class(**case.vae), dev)
    size=latent_size(vae.config, case.height, case.width, case.frames)
    z=torch.randn(1,vae.config.z_dim,*size,device=dev,dtype=vae.dtype)
    h=trp.patch(vae); print(h.summary(), flush=True)
    print('built',round(time.time()-t0,1),flush=True)
    def run(which):
        L.why_not = real if which=='pairs' else off
        torch.cuda.synchronize(); t=time.perf_counter()
        with torch.no_grad(): y=vae.decode(z).sample
        torch.cuda.synchronize(); return time.perf_counter()-t, y
    ys={}
    for which in ('usual','pairs'):
        torch.cuda.reset_peak_memory_stats(); base=torch.cuda.memory_allocated()
        t,y=run(which); print(which,'first',round(t,2)); ys[which]=y[:,:,:9].float().cpu(); del y
        t,y=run(which); print(which,'peak GB',(torch.cuda.max_memory_allocated()-base)/1e9,flush=True); del y
    a,b=ys['usual'],ys['pairs']; print('rel diff',((a-b).norm()/a.norm()).item(),'finite',torch.isfinite(b).all().item())
    ts={'usual':[],'pairs':[]}
    for i in range(5 if config!='wan2.2-5b' else 3):
        for w in (('usual','pairs'),('pairs','usual'))[i%2]: ts[w].append(run(w)[0])
    print(config,{w:(round(statistics.median(v),4),round(min(v),4)) for w,v in ts.items()},flush=True)
    h.restore()
    del vae,z; torch.cuda.empty_cache()
