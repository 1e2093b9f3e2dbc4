package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/test/markdown"
	"github.com/trivet-csi/trivet/test/measure"
)

// nfsServer is the address of the NFS server, which runs on this machine (see nfs.sh).
const nfsServer = "127.0.0.1"

// Names of the mounter that starts mount.nfs(8), and of the one that calls mount(2).
const (
	mounterProcessName = "mount.nfs"
	mounterSyscallName = "mount(2)"
)

// nfsResult contains the times of the calls for directories and images of a pool on an export.
type nfsResult struct{ directories, images *lifeResult }

// measureNFS compares directories on an export with servers that mount the export for each call, and all calls of
// an image's life on the export with a floor, which makes only the necessary system calls.
func measureNFS(ctx context.Context, g *testbed, o options) *nfsResult {
	measure.Must(os.Mkdir(g.poolPath(trivet), 0o755))
	driver := startTrivet(ctx, g, o.binary, trivet, classOf(targets.Volume("images-nfs", "ext4"), gib))
	mounters := startMounters(ctx, g)
	floors := startFloors(ctx, g, driver.class, []floorKind{{floorName, []string{"--late"}, life}}) // images on exports are formatted when they are staged
	directoryDriver := *driver
	directoryDriver.class, directoryDriver.calls = mounters[0].class, mounters[0].calls
	return &nfsResult{
		directories: measurePasses(ctx, g, append(mounters, &directoryDriver), o.volumes, 2*o.rounds),
		images:      measurePasses(ctx, g, append(floors, driver), o.volumes, 2*o.rounds),
	}
}

// startMounters starts both kinds of mounters, each with its own directory on the export.
func startMounters(ctx context.Context, g *testbed) (all []*contender) {
	directories := classOf(targets.Volume("nfs", "dir"), gib)
	for _, kind := range []floorKind{{name: mounterProcessName, flags: []string{"--processes"}}, {name: mounterSyscallName}} {
		share := "mounter" + strconv.Itoa(len(all))
		measure.Must(os.Mkdir(filepath.Join(g.served, share), 0o777))
		dir := filepath.Join(g.Dir, share)
		measure.Must(os.Mkdir(dir, 0o755))
		s := g.launch(kind.name, "/proc/self/exe", func(socket string) []string {
			return append([]string{argMounter, "--socket", socket, "--share", "/" + share, "--dir", dir}, kind.flags...)
		})
		all = append(all, &contender{server: s, clients: s.connect(ctx, manyCallers), class: directories, calls: []call{create, remove}})
	}
	return all
}

// clientCalls returns the number of calls that the NFS client of this network namespace has made, or
// 0 if the kernel has no NFS client.
func clientCalls() int {
	b, _ := os.ReadFile("/proc/net/rpc/nfs")
	_, rest, _ := strings.Cut(string(b), "\nrpc ")
	count, _, _ := strings.Cut(rest, " ")
	n, _ := strconv.Atoi(count)
	return n
}

// String compares the directories with the mounters, and the images with the floor.
func (r *nfsResult) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d volumes, %d passes, servers in turns; times in ms; RPCs are those of the NFS client per CSI call.\n\n", r.images.volumes, r.images.passes)
	b.WriteString("### Directories: one permanent mount compared with a mount per call\n\n")
	t := markdown.Table{{"call", "callers", "p50", "p99", "ops/s", "RPCs", "mount.nfs p50", "p99", "ops/s", "RPCs", "ops/s ratio", "mount(2) p50", "p99", "ops/s", "RPCs", "ops/s ratio"}}
	for _, callers := range r.images.callers {
		for _, one := range []call{create, remove} {
			r.directory(&t, one.name, callers, func(server string) *sample { return r.directories.samples.of(server, one.name, callers) })
		}
		r.directory(&t, "create + delete", callers, func(server string) *sample { return r.both(server, callers) })
	}
	b.WriteString(t.Text(true))
	b.WriteString("\n### Images on the export\n\n")
	t = markdown.Table{{"call", "callers", "p50", "p99", "ops/s", "RPCs", "floor p50", "p99", "ops/s", "RPCs", "p50 ratio", "ops/s ratio"}}
	for _, callers := range r.images.callers {
		for _, one := range life {
			own, floor := r.images.samples.of(trivet, one.name, callers), r.images.samples.of(floorName, one.name, callers)
			t.Row(slices.Concat([]string{one.name, strconv.Itoa(callers)}, own.cells(), floor.cells(), []string{times(own.slower(floor)), times(own.rate() / floor.rate())})...)
		}
	}
	b.WriteString(t.Text(true))
	b.WriteString("\n### Goals and results\n\n")
	t = markdown.Table{{"goal", "result"}}
	for _, callers := range r.images.callers {
		t.Row(fmt.Sprintf("create + delete of directories with %d callers: at least 5 × the ops/s of a mount per call", callers),
			times(r.both(trivet, callers).rate()/r.both(mounterProcessName, callers).rate())+" ×")
	}
	b.WriteString(t.Text(false))
	return b.String()
}

// both returns the sum of the times of creating and deleting a directory.
func (r *nfsResult) both(server string, callers int) *sample {
	return r.directories.samples.of(server, create.name, callers).plus(r.directories.samples.of(server, remove.name, callers))
}

// directory adds a row that compares the driver with the mounters. of returns the sample of a server.
func (r *nfsResult) directory(t *markdown.Table, label string, callers int, of func(server string) *sample) {
	row := slices.Concat([]string{label, strconv.Itoa(callers)}, of(trivet).cells())
	for _, server := range []string{mounterProcessName, mounterSyscallName} {
		row = slices.Concat(row, of(server).cells(), []string{times(of(trivet).rate() / of(server).rate())})
	}
	t.Row(row...)
}

// cells returns the p50 and p99 in ms, the calls per second, and the RPCs per call.
func (s *sample) cells() []string {
	return append(s.milliCells(), fmt.Sprintf("%.1f", s.rate()), fmt.Sprintf("%.1f", float64(s.rpcs)/float64(len(s.Durations))))
}

// plus returns the sum of s and other, call by call.
func (s *sample) plus(other *sample) *sample {
	sum := &sample{wall: s.wall + other.wall, rpcs: s.rpcs + other.rpcs}
	for i := range s.Durations {
		sum.Add(s.Durations[i] + other.Durations[i])
	}
	return sum
}
