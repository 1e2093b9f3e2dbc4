package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-csi/trivet/test/markdown"
)

// nfsServer is the server of the export, on this machine (see nfs.sh).
const nfsServer = "127.0.0.1"

// Names of the servers that mount for each call.
const (
	mounterName      = "mount.nfs"
	mounterCallsName = "mount(2)"
)

// nfsResult has the times of the calls for directories and images of an nfs pool.
type nfsResult struct {
	directories, images samples
	callers             []int
	volumes, passes     int
}

// measureNFS creates and deletes directories of an export, beside servers that mount it for
// each call, and measures the life of images on it beside a floor.
func measureNFS(ctx context.Context, g *ground, o options) (*nfsResult, error) {
	if err := os.Mkdir(g.poolPath(trivet), 0o755); err != nil {
		return nil, err
	}
	image := classOf("images-nfs", "ext4", gib)
	driver, err := startTrivet(ctx, g, o.binary, trivet, image)
	if err != nil {
		return nil, err
	}
	mounters, err := startMounters(ctx, g)
	if err != nil {
		return nil, err
	}
	floors, err := startFloors(ctx, g, image, []floorKind{{floorName, nil, life}})
	if err != nil {
		return nil, err
	}
	r := &nfsResult{directories: samples{}, images: samples{}, callers: []int{1, manyCallers}, volumes: o.volumes, passes: 2 * o.rounds}
	makes := *driver
	makes.class, makes.calls = classOf("nfs", "dir", gib), []call{create, remove}
	if err := r.take(ctx, pass{ground: g, contenders: append(mounters, &makes), samples: r.directories}); err != nil {
		return nil, err
	}
	return r, r.take(ctx, pass{ground: g, contenders: append(floors, driver), samples: r.images})
}

// take makes all passes of some contenders.
func (r *nfsResult) take(ctx context.Context, p pass) error {
	warm := p
	warm.samples, warm.prefix, warm.volumes, warm.callers = samples{}, "warm", 2, 1
	if err := warm.run(ctx); err != nil {
		return err
	}
	p.volumes = r.volumes
	for n := range r.passes {
		slices.Reverse(p.contenders)
		for _, p.callers = range r.callers {
			p.prefix = fmt.Sprintf("pass%d-%d", n, p.callers)
			if err := p.run(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

func startMounters(ctx context.Context, g *ground) ([]*contender, error) {
	var all []*contender
	for _, kind := range []struct {
		name  string
		flags []string
	}{{mounterName, []string{"--processes"}}, {mounterCallsName, nil}} {
		share := "mounter" + strconv.Itoa(len(all))
		if err := os.Mkdir(filepath.Join(g.served, share), 0o777); err != nil {
			return nil, err
		}
		dir := filepath.Join(g.base, share)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return nil, err
		}
		s, err := g.launch(kind.name, "/proc/self/exe", func(socket string) []string {
			return append([]string{argMounter, "--socket", socket, "--share", "/" + share, "--dir", dir}, kind.flags...)
		})
		if err != nil {
			return nil, err
		}
		c := &contender{server: s, class: classOf("nfs", "dir", gib), calls: []call{create, remove}}
		if c.clients, err = s.connect(ctx, manyCallers); err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
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
	fmt.Fprintf(&b, "%d volumes, %d passes, servers in turns; times in ms; RPCs are the client's to the server, per call.\n\n", r.volumes, r.passes)
	b.WriteString("### Directories: a mount held beside a mount per call\n\n")
	t := markdown.Table{{"call", "callers", "p50", "p99", "ops/s", "RPCs", "mount.nfs p50", "p99", "ops/s", "RPCs", "ops/s ratio", "mount(2) p50", "p99", "ops/s", "RPCs", "ops/s ratio"}}
	for _, callers := range r.callers {
		for _, one := range []call{create, remove} {
			r.directory(&t, one.name, callers, func(server string) *sample { return r.directories.of(server, one.name, callers) })
		}
		r.directory(&t, "create + delete", callers, func(server string) *sample { return r.both(server, callers) })
	}
	b.WriteString(t.Text(true))
	b.WriteString("\n### Images on the export\n\n")
	t = markdown.Table{{"call", "callers", "p50", "p99", "ops/s", "RPCs", "floor p50", "p99", "ops/s", "RPCs", "p50 ratio", "ops/s ratio"}}
	for _, callers := range r.callers {
		for _, one := range life {
			own, floor := r.images.of(trivet, one.name, callers), r.images.of(floorName, one.name, callers)
			t.Row(slices.Concat([]string{one.name, strconv.Itoa(callers)}, own.cells(), floor.cells(), []string{times(own.slower(floor)), times(own.rate() / floor.rate())})...)
		}
	}
	b.WriteString(t.Text(true))
	b.WriteString("\n### Wanted and reached\n\n")
	t = markdown.Table{{"wanted", "reached"}}
	for _, callers := range r.callers {
		t.Row(fmt.Sprintf("create + delete of directories, callers: %d: at least 5 × of mounting per call", callers),
			times(r.both(trivet, callers).rate()/r.both(mounterName, callers).rate())+" ×")
	}
	b.WriteString(t.Text(false))
	return b.String()
}

// both is create and delete of directories, one after the other.
func (r *nfsResult) both(server string, callers int) *sample {
	return r.directories.of(server, create.name, callers).then(r.directories.of(server, remove.name, callers))
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
	ms := func(n int) string { return fmt.Sprintf("%.1f", float64(s.at(n))/1e6) }
	return []string{ms(50), ms(99), fmt.Sprintf("%.1f", s.rate()), fmt.Sprintf("%.1f", float64(s.rpcs)/float64(len(s.took)))}
}

// then adds the times of next to those of s, call by call.
func (s *sample) then(next *sample) *sample {
	both := &sample{wall: s.wall + next.wall, rpcs: s.rpcs + next.rpcs}
	for i := range s.took {
		both.took = append(both.took, s.took[i]+next.took[i])
	}
	return both
}
