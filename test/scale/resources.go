package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/test/measure"
)

// samples contains the durations for each call, way and number of callers.
type samples map[place]measure.Durations

type place struct {
	way     way
	call    string
	callers int
}

// way is the route of calls to a node.
type way string

const (
	routed way = "routed"
	direct way = "direct"
)

func (all samples) add(w way, call string, callers int, took ...time.Duration) {
	at := place{w, call, callers}
	all[at] = append(all[at], took...)
}

// needs are the resources of a process; memory is in bytes.
type needs struct {
	resident, anonymous, peak int64
	heap                      int64 // objects in use or not yet collected
	goroutines                int64
	files, sockets            int64
}

// needsOf reads the resources of a process that serves its metrics at a host:port.
func needsOf(ctx context.Context, p *measure.Process, metrics string) needs {
	n := needs{resident: p.Memory("VmRSS"), anonymous: p.Memory("RssAnon"), peak: p.Memory("VmHWM")}
	dir := fmt.Sprintf("/proc/%d/fd", p.PID)
	for _, e := range measure.Get(os.ReadDir(dir)) {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil { // closed meanwhile
			continue
		}
		n.files++
		if strings.HasPrefix(target, "socket:") {
			n.sockets++
		}
	}
	all := measure.Get(measure.Scrape(ctx, metrics))
	n.heap, n.goroutines = int64(all["go_memstats_heap_alloc_bytes"]), int64(all["go_goroutines"])
	return n
}
