"""The built-in program of ``hicache-obs explore``: the whole cache controller on a small workload. Imports torch."""
from __future__ import annotations
from collections import Counter
from hicache_obs.controller.engine import EngineConfig, build_engine
from hicache_obs.controller.scheduler import SchedulerOptions
from hicache_obs.controller.workloads import generate, Request
from hicache_obs.records import Mode, device
from hicache_obs.testing.protections import PROTECTIONS
from hicache_obs.testing.world import World
class ControllerProgram:
    def __init__(self, fence, off, requests, device_pages, host_pages, max_running=2, layers=2,page_size=2):
        self.fence,self.off,self.requests=fence,off,requests
        self.config=EngineConfig(runner="pattern",fence=fence,device_pages=device_pages,host_pages=host_pages,page_size=page_size,layers=layers,heads=1,head_dim=1,vocabulary=64,seed=0,
          scheduler=SchedulerOptions(max_running=max_running,early_backup=True,poll_acks=True))
        self.stats=[]
    def __call__(self, world):
        world.recorder.define_engine("x"); world.recorder.define_pool("kv",self.config.layers)
        e=build_engine(world.device,self.config,self.requests)
        e.scheduler.on_alloc=lambda o,p: world.recorder.page_alloc(o,device(Mode.WRITE,p))
        e.scheduler.on_free=lambda o,p: world.recorder.page_free(o,device(Mode.WRITE,p))
        for n in self.off: PROTECTIONS[n].remove(e)
        e.run(self.requests)
        c=e.scheduler.counters; k=e.controller.counters
        self.stats.append((c.rounds,c.retractions,k.load_backs,k.write_backs,c.evicted_device_pages,c.evicted_host_pages,len(e.ledger.corrupted())))
