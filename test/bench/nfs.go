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

// nfsServer is the server of the export, on this machine (see nfs.sh).
const nfsServer = "127.0.0.1"

// Names of the servers that mount for each call.
const (
	mounterName      = "mount.nfs"
	mounterCallsName = "mount(2)"
)

// nfsResult has the times of the calls for directories and images of an nfs pool.
type nfsResult struct{ directories, images *lifeResult }

// measureNFS creates and deletes directories of an export, beside servers that mount it for
// each call, and measures the life of images on it beside a floor.
func measureNFS(ctx context.Context, g *ground, o options) *nfsResult {
	measure.Must(os.Mkdir(g.poolPath(trivet), 0o755))
	driver := startTrivet(ctx, g, o.binary, trivet, classOf(targets.Volume("images-nfs", "ext4"), gib))
	mounters := startMounters(ctx, g)
	floors := startFloors(ctx, g, driver.class, []floorKind{{floorName, nil, life}})
	makes := *driver
	makes.class, makes.calls = mounters[0].class, mounters[0].calls
	return &nfsResult{
		directories: measurePasses(ctx, g, append(mounters, &makes), o.volumes, 2*o.rounds),
		images:      measurePasses(ctx, g, append(floors, driver), o.volumes, 2*o.rounds),
	}
}

func startMounters(ctx context.Context, g *ground) (all []*contender) {
	of := classOf(targets.Volume("nfs", "dir"), gib)
	for _, kind := range []floorKind{{name: mounterName, flags: []string{"--processes"}}, {name: mounterCallsName}} {
		share := "mounter" + strconv.Itoa(len(all))
		measure.Must(os.Mkdir(filepath.Join(g.served, share), 0o777))
		dir := filepath.Join(g.Dir, share)
		measure.Must(os.Mkdir(dir, 0o755))
		s := g.launch(kind.name, "/proc/self/exe", func(socket string) []string {
			return append([]string{argMounter, "--socket", socket, "--share", "/" + share, "--dir", dir}, kind.flags...)
		})
		all = append(all, &contender{server: s, clients: s.connect(ctx, manyCallers), class: of, calls: []call{create, remove}})
	}
	return all
}

// clientCalls is the number of calls of the NFS client of this network namespace; 0 if there
// is none.
func clientCalls() int {
	b, _ := os.ReadFile("/proc/net/rpc/nfs")
	_, rest, _ := strings.Cut(string(b), "\nrpc ")
	count, _, _ := strings.Cut(rest, " ")
	n, _ := strconv.Atoi(count)
	return n
}

// String shows the directories beside the mounts, and the images beside the floor.
func (r *nfsResult) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d volumes, %d passes, servers in turns; times in ms; RPCs are the client's to the server, per call.\n\n", r.images.volumes, r.images.passes)
	b.WriteString("### Directories: a mount held beside a mount per call\n\n")
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
		t.Row(fmt.Sprintf("create + delete of directories, callers: %d: at least 5 × of mounting per call", callers),
			times(r.both(trivet, callers).rate()/r.both(mounterName, callers).rate())+" ×")
	}
	b.WriteString(t.Text(false))
	return b.String()
}

// both is create and delete of directories, one after the other.
func (r *nfsResult) both(server string, callers int) *sample {
	return r.directories.samples.of(server, create.name, callers).then(r.directories.samples.of(server, remove.name, callers))
}

func (r *nfsResult) directory(t *markdown.Table, label string, callers int, of func(server string) *sample) {
	row := slices.Concat([]string{label, strconv.Itoa(callers)}, of(trivet).cells())
	for _, server := range []string{mounterName, mounterCallsName} {
		row = slices.Concat(row, of(server).cells(), []string{times(of(trivet).rate() / of(server).rate())})
	}
	t.Row(row...)
}

// cells returns p50 and p99 in ms, calls per second, and RPCs per call.
func (s *sample) cells() []string {
	ms := func(n int) string { return fmt.Sprintf("%.1f", float64(s.At(n))/1e6) }
	return []string{ms(50), ms(99), fmt.Sprintf("%.1f", s.rate()), fmt.Sprintf("%.1f", float64(s.rpcs)/float64(len(s.Durations)))}
}

// then adds the times of next to those of s, call by call.
func (s *sample) then(next *sample) *sample {
	both := &sample{wall: s.wall + next.wall, rpcs: s.rpcs + next.rpcs}
	for i := range s.Durations {
		both.Add(s.Durations[i] + next.Durations[i])
	}
	return both
}
