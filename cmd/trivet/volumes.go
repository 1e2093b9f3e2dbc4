package main

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"

	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// errUnread ends the command with status 1 when not all could be read.
var errUnread = errors.New("not everything could be read: see the problems above")

// listed is one volume, or a pool that could not be read.
type listed struct {
	Pool      string `json:"pool" yaml:"pool"`
	ID        string `json:"id,omitempty" yaml:"id,omitempty"`
	Name      string `json:"name,omitempty" yaml:"name,omitempty"`
	Backend   string `json:"backend,omitempty" yaml:"backend,omitempty"`
	SizeBytes int64  `json:"sizeBytes" yaml:"sizeBytes"`
	UsedBytes int64  `json:"usedBytes" yaml:"usedBytes"`
	// Content is the filesystem, or `block`.
	Content string `json:"content,omitempty" yaml:"content,omitempty"`
	State   string `json:"state,omitempty" yaml:"state,omitempty"`
	// Nodes are those that it is controller-published to.
	Nodes   []string `json:"nodes,omitempty" yaml:"nodes,omitempty"`
	Device  string   `json:"device,omitempty" yaml:"device,omitempty"`
	Problem string   `json:"problem,omitempty" yaml:"problem,omitempty"`
}

func runVolumes(args []string) error {
	flags := flag.NewFlagSet("trivet volumes", flag.ContinueOnError)
	path, stateDir := configFlag(flags), stateDirFlag(flags)
	format := outputFlag(flags, "table", "json", "yaml")
	if err := parse(flags, args); err != nil {
		return err
	}
	config, err := driver.LoadConfig(*path, *path == defaultConfig, filepath.Clean(*stateDir))
	if err != nil {
		return err
	}
	devices, err := devicesByTag()
	if err != nil {
		return err
	}
	all := []listed{}
	for _, c := range config.Pools {
		all = append(all, listPool(c, filepath.Clean(*stateDir), devices)...)
	}
	if err := write(os.Stdout, *format, all, table(all)); err != nil {
		return err
	}
	for _, v := range all {
		if v.Problem != "" {
			return errUnread
		}
	}
	return nil
}

// devicesByTag finds what is staged here.
func devicesByTag() (map[string]string, error) {
	devices, err := loop.Devices()
	byTag := map[string]string{}
	for _, d := range devices {
		byTag[d.Tag] = d.Path
	}
	return byTag, err
}

func listPool(c pool.Config, stateDir string, devices map[string]string) []listed {
	p, err := pool.Look(context.Background(), c, stateDir)
	if err != nil {
		return []listed{{Pool: c.Name, Problem: err.Error()}}
	}
	defer p.Close()
	entries, err := p.Entries()
	if err != nil {
		return []listed{{Pool: c.Name, Problem: err.Error()}}
	}
	var out []listed
	for _, e := range entries {
		out = append(out, list(c.Name, e, devices))
	}
	return out
}

func list(pool string, e pool.Entry, devices map[string]string) listed {
	l := listed{Pool: pool, Name: e.Name, UsedBytes: e.Used}
	if e.Err != nil {
		l.Problem = e.Err.Error()
	}
	if e.Node != "" {
		l.Nodes = []string{e.Node}
	}
	v := e.Volume
	if v.Version == 0 { // no record to read
		return l
	}
	l.ID, l.Name, l.Backend, l.SizeBytes = v.ID.String(), v.CoName, v.ID.Backend, v.Capacity
	l.Content, l.State, l.Device = v.FSType, string(e.State), devices[loop.Tag(v.ID)]
	if v.Block {
		l.Content = "block"
	} else if l.State == "" {
		l.State = "blank"
	}
	return l
}

func table(all []listed) [][]string {
	rows := [][]string{{"POOL", "ID", "NAME", "SIZE", "USED", "CONTENT", "STATE", "NODE", "DEVICE", "PROBLEM"}}
	for _, v := range all {
		node := ""
		if len(v.Nodes) > 0 {
			node = v.Nodes[0]
		}
		row := []string{v.Pool, v.ID, v.Name, volume.FormatSize(v.SizeBytes), volume.FormatSize(v.UsedBytes), v.Content, v.State, node, v.Device, v.Problem}
		for i, cell := range row {
			if cell == "" {
				row[i] = "-"
			}
		}
		rows = append(rows, row)
	}
	return rows
}
