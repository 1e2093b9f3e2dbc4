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

// samples contains the durations of the calls for each way, call and number of callers.
type samples map[sampleKey]measure.Durations

type sampleKey struct {
	way     way
	call    string
	callers int
}

// way is how calls reach a node.
type way string

const (
	routed way = "routed" // through the controller's driver
	direct way = "direct" // to the node's driver
)

// add adds durations of a call.
func (all samples) add(w way, call string, callers int, took ...time.Duration) {
	at := sampleKey{w, call, callers}
	all[at] = append(all[at], took...)
}

// resources are the resources that a process uses. Memory is in bytes.
type resources struct {
	resident, anonymous, peak int64 // VmRSS, RssAnon and VmHWM
	heap                      int64 // Go objects in use or not yet collected
	goroutines                int64
	files, sockets            int64 // the number of open files, and of the sockets among them
}

// resourcesOf reads the resources of a process that serves its metrics at a host:port.
func resourcesOf(ctx context.Context, p *measure.Process, metrics string) resources {
	n := resources{resident: p.Memory("VmRSS"), anonymous: p.Memory("RssAnon"), peak: p.Memory("VmHWM")}
	dir := fmt.Sprintf("/proc/%d/fd", p.PID)
	for _, e := range measure.Get(os.ReadDir(dir)) {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil { // closed since ReadDir
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
