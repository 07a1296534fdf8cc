import statistics, sys, time, traceback, torch
from turbo_rcm_patch import kernels
from turbo_rcm_patch.kernels.conv import conv_pairs_sm90 as L, conv_skip as cs, conv_pairs as P
from turbo_rcm_patch.kernels.conv.conv_pairs_weight import pair_weight
from turbo_rcm_patch.kernels.rows.rms_norm_silu_pairs import RMS_NORM_SILU_PAIRS, _rms_norm_silu_pairs
from turbo_rcm_patch.kernels.rows.rms_norm_silu import rms_norm_silu
from turbo_rcm_patch.kernels.conv.conv_weight import pack_weight
d='cuda'
def timed(fs, n=7):
    for f in fs: f(); f()
    torch.cuda.synchronize(); out=[[] for _ in fs]
    for _ in range(n):
        for i,f in enumerate(fs):
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            a.record(); f(); f(); b.record(); torch.cuda.synchronize(); out[i].append(a.elapsed_time(b)/2)
    return [statistics.median(o) for o in out]
end=time.time()+float(sys.argv[1])
for (T,H,W,C,N,res) in ((6,240,416,192,192,True),(6,240,416,192,192,False),(4,240,416,192,192,True),(14,120,208,384,384,True),(20,60,104,384,384,True),(2,352,640,256,256,True),(2,352,640,512,256,False),(4,176,320,512,512,True),(4,176,320,1024,512,False),(8,88,160,1024,1024,True),(12,44,80,1024,1024,True)):
    if time.time()>end: break
    try:
        torch.manual_seed(0)
        x=torch.randn(1,T,H,W,C,device=d,dtype=torch.bfloat16); w=(torch.randn(N,C,3,3,3,device=d)/(27*C)**.5).bfloat16(); b=torch.randn(N,device=d,dtype=torch.bfloat16)
        g=torch.rand(C,device=d).bfloat16()+.5
        f=torch.randn(1,2,H,W,C,device=d,dtype=torch.bfloat16); r=torch.randn(1,T,H,W,N,device=d,dtype=torch.bfloat16) if res else None
        wt=w.permute(0,2,3,4,1); wc=pack_weight(wt)
        f1=f.clone()
        n=rms_norm_silu(x,g); planes=_rms_norm_silu_pairs(x,g,f1); wp=pair_weight(wt)
        out=torch.empty(1,2*planes.shape[1],H,W,N,device=d,dtype=torch.bfloat16)
        usual=lambda: kernels.conv_skip(n,wc,b,r,front=f)
        pairs=lambda: L.launch(planes,wp,b,r,out)
        torch.cuda.synchronize()
        y=usual(); pairs(); torch.cuda.synchronize()
        n32=torch.cat((f.float(),kernels.reference.rms_norm_silu(x[:, :2].float(),g.float(),True)),1) if False else None
        e=((out[:,:T].float()-y.float()).norm()/y.float().norm()).item()
        t=timed([usual,pairs,lambda: rms_norm_silu(x,g),lambda: _rms_norm_silu_pairs(x,g,f1),lambda: pair_weight(wt)])
        fl=2*27*T*H*W*C*N/1e9
        print(f"{(T,H,W,C,N,res)} usual {t[0]:.3f} ms {fl/t[0]:.0f} TF | pairs {t[1]:.3f} {fl*2/3/t[1]:.0f} TF | norm {t[2]:.3f} {t[3]:.3f} weight {t[4]:.3f} | sum {t[0]+t[2]:.3f} -> {t[1]+t[3]:.3f} | diff {e:.5f}",flush=True)
    except Exception: traceback.print_exc()
    sys.stderr.flush()
