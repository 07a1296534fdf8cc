import statistics, torch, importlib, time
m=importlib.import_module('turbo_rcm_patch.kernels.rows.rms_norm_silu_pairs')
from turbo_rcm_patch.kernels.rows.rms_norm_silu import rms_norm_silu
d='cuda'
def timed(fs, n=9):
    for f in fs: f(); f()
    torch.cuda.synchronize(); out=[[] for _ in fs]
    for k in range(n):
        for i in (range(len(fs)) if k%2 else reversed(range(len(fs)))):
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            a.record(); fs[i](); fs[i](); b.record(); torch.cuda.synchronize(); out[i].append(a.elapsed_time(b)/2)
    return [statistics.median(o) for o in out]
V=((2048,512),(1024,256),(1024,512),(2048,256),(4096,512),(512,256),(512,512))
for (T,H,W,C) in ((6,240,416,192),(14,120,208,384),(2,352,640,256),(2,352,640,512),(4,176,320,512),(8,88,160,1024),(21,60,104,384)):
    x=torch.randn(1,T,H,W,C,device=d,dtype=torch.bfloat16); g=torch.rand(C,device=d).bfloat16()+.5; f=torch.randn(1,2,H,W,C,device=d,dtype=torch.bfloat16)
    def one(e,w):
        def run():
            m.ELEMENTS,m.VALUES_OF_A_WARP=e,w
            return m._rms_norm_silu_pairs(x,g,f)
        return run
    t=timed([lambda: rms_norm_silu(x,g)]+[one(*v) for v in V])
    gb=2*H*W*C*(T+4*((T+1)//2)+4)/1e9
    print((T,H,W,C),'usual',round(t[0],3),{v:(round(a,3),round(gb/a*1000)) for v,a in zip(V,t[1:])},flush=True)
