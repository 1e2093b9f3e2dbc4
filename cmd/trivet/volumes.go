package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// errIncomplete makes the command exit with status 1. The output contains the problems.
var errIncomplete = errors.New("some objects could not be read: see the problems above")

// listed is one volume, or a pool that could not be read.
type listed struct {
	Pool      string `json:"pool" yaml:"pool"`
	ID        string `json:"id,omitempty" yaml:"id,omitempty"`
	Name      string `json:"name,omitempty" yaml:"name,omitempty"`
	Backend   string `json:"backend,omitempty" yaml:"backend,omitempty"`
	SizeBytes int64  `json:"sizeBytes" yaml:"sizeBytes"`
	UsedBytes int64  `json:"usedBytes" yaml:"usedBytes"`
	// Content is the filesystem, `block` or `directory`.
	Content string `json:"content,omitempty" yaml:"content,omitempty"`
	// SubDir is the path of the volume's directory in the pool, if its StorageClass sets subDir.
	SubDir string `json:"subDir,omitempty" yaml:"subDir,omitempty"`
	State  string `json:"state,omitempty" yaml:"state,omitempty"`
	// Nodes are the nodes to which the volume is controller-published.
	Nodes []string `json:"nodes,omitempty" yaml:"nodes,omitempty"`
	// Pod is the namespace/name of the pod that an inline volume belongs to.
	Pod string `json:"pod,omitempty" yaml:"pod,omitempty"`
	// Namespace is the namespace whose pods may mount the volume by FlexVolume.
	Namespace string `json:"namespace,omitempty" yaml:"namespace,omitempty"`
	Device    string `json:"device,omitempty" yaml:"device,omitempty"`
	Problem   string `json:"problem,omitempty" yaml:"problem,omitempty"`
}

func runVolumes(args []string) error {
	flags := flag.NewFlagSet("trivet volumes", flag.ContinueOnError)
	path, stateDir := configFlag(flags), stateDirFlag(flags)
	format := outputFlag(flags, "table", "json", "yaml")
	if err := parse(flags, args); err != nil {
		return err
	}
	config, err := loadConfig(*path, filepath.Clean(*stateDir))
	if err != nil {
		return err
	}
	devices, incomplete := devicesByTag()
	all := []listed{}
	for _, c := range config.Pools {
		in := listInput{Config: c, StateDir: filepath.Clean(*stateDir), Devices: devices}
		if c.Shared() {
			all = append(all, listShared(in)...)
		} else {
			all = append(all, listPool(patience, in)...)
		}
	}
	if err := write(os.Stdout, *format, all, table(all)); err != nil {
		return err
	}
	if slices.ContainsFunc(all, func(v listed) bool { return v.Problem != "" }) {
		incomplete = errors.Join(incomplete, errIncomplete)
	}
	return incomplete
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
func listPool(atMost time.Duration, in listInput) []listed {
	entries, err := doctor.Within(atMost, func() ([]pool.Entry, error) { return readPool(in.Config, in.StateDir) })
	if err != nil {
		return []listed{{Pool: in.Config.Name, Problem: err.Error()}}
	}
	var out []listed
	for _, e := range entries {
		out = append(out, newListed(in.Config.Name, e, in.Devices))
	}
	return out
}

// listShared returns the volumes of an nfs pool. If the pool cannot be read completely, the last entry contains
// the problem.
func listShared(in listInput) []listed {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var out []listed
	if err := inChild(ctx, listTask, in, func(l listed) { out = append(out, l) }); err != nil {
		out = append(out, listed{Pool: in.Config.Name, Problem: err.Error()})
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

// newListed converts an entry of a pool. devices are the loop devices of staged volumes, by tag.
func newListed(pool string, e pool.Entry, devices map[string]string) listed {
	l := listed{Pool: pool, Name: e.Name, UsedBytes: e.Used, Nodes: e.Nodes}
	if e.Err != nil {
		l.Problem = e.Err.Error()
	}
	v := e.Volume
	if v.Version == 0 { // the volume has no readable record
		return l
	}
	l.ID, l.Name, l.Backend, l.SizeBytes = v.ID.String(), v.CoName, v.ID.Backend, v.Capacity
	l.Namespace = v.Namespace
	l.Content, l.State, l.Device = v.FSType, string(e.State), cmp.Or(devices[loop.Tag(v.ID)], e.Device)
	if v.Ephemeral != nil {
		l.Pod = v.Ephemeral.Pod.Namespace + "/" + v.Ephemeral.Pod.Name
	}
	switch {
	case v.Directory != nil:
		l.Content, l.SubDir = "directory", v.Directory.SubDir
	case v.Block:
		l.Content = "block"
	case l.State == "" && e.Err == nil:
		l.State = "blank"
	}
	return l
}

// table returns the table of volumes with its header.
func table(all []listed) [][]string {
	return rows("POOL ID NAME SIZE USED CONTENT STATE NODE POD DEVICE PROBLEM", all, func(v listed) []string {
		row := []string{
			v.Pool, v.ID, v.Name, volume.FormatSize(v.SizeBytes), volume.FormatSize(v.UsedBytes), v.Content, v.State,
			strings.Join(v.Nodes, ","), v.Pod, v.Device, v.Problem,
		}
		for i, cell := range row {
			row[i] = cmp.Or(cell, "-")
		}
		return row
	})
}
