package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// errIncomplete makes the command exit with status 1. The output contains the problems.
var errIncomplete = errors.New("some objects could not be read: see the problems above")

func newVolumesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "volumes",
		GroupID: adminGroup,
		Short:   "List the volumes of the pools, as read from the disk",
		Long: `Lists the volumes in the pools of this node, as read from the disk. It changes nothing
in a pool, and needs no running driver. In a container it creates missing nodes
/dev/loopN.

In JSON and YAML, usedBytes is the allocated space of an image or of a directory with a
limit, the size of a whole disk, and 0 for a directory without a limit. state is blank
before a volume has a filesystem, then formatting and formatted: most images are
formatted when they are created, other volumes when they are first staged. Raw devices
and directories have no state. publishedTo are the nodes to which the volume is
controller-published. pod is the pod of an inline volume. namespace is the namespace
whose pods can mount the volume by FlexVolume. device is the loop device of an image
that is staged on this node, or the whole disk. problem is the reason why the pool or
the volume cannot be used. health are the conditions that the driver at --endpoint has
found in its last examination; without a running driver there are none.

The exit status is 1 if a pool, a record or the loop devices cannot be read; all other
volumes are listed anyway. The time limit for a pool is 20 seconds.`,
		Example: `  # The volumes of the pools in /etc/trivet/config.yaml.
  trivet volumes

  # Those that FlexVolume created, with all data.
  trivet volumes -o yaml --config /etc/trivet/flexvolume.yaml --state-dir /var/lib/trivet/flexvolume`,
	}
	path, stateDir := configFlag(cmd), stateDirFlag(cmd)
	endpoint := endpointFlag(cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		socket, err := driver.SocketPath(*endpoint)
		if err != nil {
			return fmt.Errorf("--endpoint: %w", err)
		}
		config, err := loadConfig(*path, filepath.Clean(*stateDir))
		if err != nil {
			return err
		}
		bar := startProgress(cmd.ErrOrStderr())
		all, incomplete := listPools(config.Pools, filepath.Clean(*stateDir), bar)
		bar.end()
		r := status.Report{Volumes: all}
		found, err := requestExamination(cmd.Context(), socket)
		r.AddHealth("", found)
		return errors.Join(out.write(r.Volumes, volumeTable(r.Volumes, err == nil)), incomplete)
	}
	return cmd
}

// examinationPatience limits the wait for the driver, which answers at once if it runs.
const examinationPatience = 2 * time.Second

// requestExamination returns the result of the last examination of the driver at a socket.
func requestExamination(ctx context.Context, socket string) (status.Examination, error) {
	conn, err := dialDriver(socket)
	if err != nil {
		return status.Examination{}, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, examinationPatience)
	defer cancel()
	return status.FetchExamination(ctx, conn)
}

// listPools returns the volumes of all pools. The error states that the list is incomplete.
func listPools(pools []pool.Config, stateDir string, bar *progress) (all []status.Volume, incomplete error) {
	devices, incomplete := devicesByTag()
	all = []status.Volume{}
	for _, c := range pools {
		bar.next("Reading pool %s", c.Name)
		in := listInput{Config: c, StateDir: stateDir, Devices: devices}
		if c.Shared() {
			all = append(all, listShared(in)...)
		} else {
			all = append(all, listPool(patience, in)...)
		}
	}
	if slices.ContainsFunc(all, func(v status.Volume) bool { return v.Problem != "" }) {
		incomplete = errors.Join(incomplete, errIncomplete)
	}
	return all, incomplete
}

// devicesByTag returns the loop devices of the volumes that are staged on this node, by the tag of the volume
// (loop.Tag).
func devicesByTag() (map[string]string, error) {
	devices, err := doctor.Within(patience, loop.Devices)
	if err != nil {
		return nil, fmt.Errorf("the staged volumes are unknown: loop devices: %w: run this command as root, with the host's /sys and /dev", err)
	}
	byTag := map[string]string{}
	for _, d := range devices {
		byTag[d.VolumeTag()] = d.Path
	}
	return byTag, nil
}

// listPool returns the volumes of a pool. If the pool cannot be read within atMost, it returns one entry with
// the problem.
func listPool(atMost time.Duration, in listInput) []status.Volume {
	entries, err := doctor.Within(atMost, func() ([]pool.Entry, error) { return readPool(in.Config, in.StateDir) })
	if err != nil {
		return []status.Volume{{Pool: in.Config.Name, Problem: err.Error()}}
	}
	var out []status.Volume
	for _, e := range entries {
		out = append(out, newListed(in.Config.Name, e, in.Devices))
	}
	return out
}

// listShared returns the volumes of an nfs pool. If the pool cannot be read completely, the last entry contains
// the problem.
func listShared(in listInput) []status.Volume {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var out []status.Volume
	if err := inChild(ctx, listTask, in, func(l status.Volume) { out = append(out, l) }); err != nil {
		out = append(out, status.Volume{Pool: in.Config.Name, Problem: err.Error()})
	}
	return out
}

// readPool reads the volumes of a pool of this node.
func readPool(c pool.Config, stateDir string) ([]pool.Entry, error) {
	p, err := pool.OpenReadOnly(context.Background(), kinds.Forms(), c, stateDir)
	if err != nil {
		return nil, err
	}
	defer p.Close()
	return p.Entries()
}

// newListed returns an entry of a pool. devices are the loop devices of staged volumes, by tag.
func newListed(pool string, e pool.Entry, devices map[string]string) status.Volume {
	l := status.OfEntry(pool, e)
	l.Device = cmp.Or(devices[loop.Tag(e.Volume.ID)], l.Device)
	return l
}

// volumeTable returns the table of volumes. Empty cells contain "-", also those of the health of volumes that were not examined.
func volumeTable(all []status.Volume, examined bool) table {
	text := func(name string, cell func(status.Volume) string) column[status.Volume] {
		return column[status.Volume]{name: name, cell: func(v status.Volume) string { return cmp.Or(cell(v), "-") }}
	}
	wide := func(name string, cell func(status.Volume) string) column[status.Volume] {
		c := text(name, cell)
		c.wide = true
		return c
	}
	health := text("HEALTH", func(v status.Volume) string {
		if !examined || v.ID == "" {
			return ""
		}
		return healthText(v)
	})
	health.color = healthColor
	problem := text("PROBLEM", func(v status.Volume) string { return v.Problem })
	problem.color = problemColor
	return newTable(
		all,
		text("POOL", func(v status.Volume) string { return v.Pool }),
		text("ID", func(v status.Volume) string { return v.ID }),
		text("NAME", func(v status.Volume) string { return v.Name }),
		wide("BACKEND", func(v status.Volume) string { return v.Backend }),
		text("SIZE", func(v status.Volume) string { return volume.FormatSize(v.SizeBytes) }),
		text("USED", func(v status.Volume) string { return volume.FormatSize(v.UsedBytes) }),
		text("CONTENT", func(v status.Volume) string { return v.Content }),
		wide("SUBDIR", func(v status.Volume) string { return v.SubDir }),
		text("STATE", func(v status.Volume) string { return v.State }),
		wide("PUBLISHED TO", func(v status.Volume) string { return strings.Join(v.PublishedTo, ",") }),
		text("POD", func(v status.Volume) string { return v.Pod }),
		wide("NAMESPACE", func(v status.Volume) string { return v.Namespace }),
		text("DEVICE", func(v status.Volume) string { return v.Device }),
		health,
		problem,
	)
}

func healthColor(v status.Volume) color {
	if len(v.Health) > 0 {
		return red
	}
	return noColor
}

func problemColor(v status.Volume) color {
	if v.Problem != "" {
		return red
	}
	return noColor
}
