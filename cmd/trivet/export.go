package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// The tasks on an export that are done by a child.
const (
	examineTask = "examine"
	listTask    = "list"
	initTask    = "init"
)

// exportFlags name an export that need not be in the configuration.
func exportFlags(flags *flag.FlagSet) (server, export *string) {
	server = flags.String("server", "", "`name` or address of an NFS server, with --export: instead of a pool of the configuration")
	export = flags.String("export", "", "`path` that the server exports")
	flags.StringVar(export, "share", "", "another word for --export")
	return server, export
}

// unconfigured is the configuration of an export that the flags name.
func unconfigured(server, export string) (c pool.Config, err error) {
	if server, err = volume.CanonicalServer(server); err != nil {
		return c, fmt.Errorf("--server%w", err)
	}
	if export, err = volume.CanonicalExport(export); err != nil {
		return c, fmt.Errorf("--export%w", err)
	}
	return pool.Config{Name: server + ":" + export, NFS: &pool.NFS{Server: server, Export: export}}, nil
}

func examineInChild(ctx context.Context, e doctor.Export, tell func(doctor.Check)) error {
	return inChild(ctx, examineTask, e, tell)
}

func examine(ctx context.Context, input []byte, tell func(any) error) error {
	var e doctor.Export
	if err := json.Unmarshal(input, &e); err != nil {
		return err
	}
	var untold error
	doctor.ExamineExport(ctx, kinds, e, func(c doctor.Check) { untold = errors.Join(untold, tell(c)) })
	return untold
}

// listInput is what a list of a pool's volumes wants to know.
type listInput struct {
	Config   pool.Config
	StateDir string
	// Devices are those of images that are staged here, by tag.
	Devices map[string]string
}

func listExport(ctx context.Context, input []byte, tell func(any) error) error {
	var in listInput
	if err := json.Unmarshal(input, &in); err != nil {
		return err
	}
	top, _, err := export.Mount(ctx, in.Config)
	if err != nil {
		return err
	}
	defer top.Close()
	p, err := pool.OpenExportReadOnly(ctx, kinds.Forms(), top, in.Config, in.StateDir)
	if err != nil {
		return err
	}
	defer p.Close()
	entries, err := p.Entries()
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := tell(list(in.Config.Name, e, in.Devices)); err != nil {
			return err
		}
	}
	return nil
}

func initExport(ctx context.Context, input []byte, tell func(any) error) error {
	var c pool.Config
	if err := json.Unmarshal(input, &c); err != nil {
		return err
	}
	top, _, err := export.Mount(ctx, c)
	if err != nil {
		return err
	}
	defer top.Close()
	uuid, err := pool.InitShared(top, c)
	if err != nil {
		return err
	}
	return tell(uuid)
}

const poolUsage = `usage: trivet pool init [--config FILE] NAME
       trivet pool init --server SERVER --export PATH

Makes an NFS export a pool, and prints the UUID that the configuration can pin.
The export has to be empty. One that is a pool already stays as it is.
`

func runPool(args []string) error {
	if asksForHelp(args) {
		fmt.Print(poolUsage)
		return errHelp
	}
	if len(args) == 0 || args[0] != "init" {
		return fmt.Errorf("want init\n\n%s", poolUsage)
	}
	flags := flag.NewFlagSet("trivet pool init", flag.ContinueOnError)
	path, stateDir := configFlag(flags), stateDirFlag(flags)
	server, export := exportFlags(flags)
	if err := flags.Parse(args[1:]); err != nil {
		return flagError(err)
	}
	c, err := poolToInit(*path, *stateDir, *server, *export, flags.Args())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return inChild(ctx, initTask, c, func(uuid string) { fmt.Println("uuid:", uuid) })
}

// poolToInit is the pool that flags and arguments name.
func poolToInit(path, stateDir, server, export string, names []string) (pool.Config, error) {
	if server != "" || export != "" {
		if len(names) > 0 {
			return pool.Config{}, fmt.Errorf("unexpected argument %q: --server and --export say which export it is", names[0])
		}
		return unconfigured(server, export)
	}
	if len(names) != 1 {
		return pool.Config{}, errors.New("want the name of one pool, after the flags; or --server and --export")
	}
	config, err := driver.LoadConfig(path, path == defaultConfig, filepath.Clean(stateDir), kinds)
	if err != nil {
		return pool.Config{}, err
	}
	i := slices.IndexFunc(config.Pools, func(c pool.Config) bool { return c.Name == names[0] })
	switch {
	case i < 0:
		return pool.Config{}, fmt.Errorf("pool %q is not in %s", names[0], path)
	case !config.Pools[i].Shared():
		return pool.Config{}, fmt.Errorf("pool %q is a directory of a node: the driver makes it a pool when it starts", names[0])
	}
	return config.Pools[i], nil
}

// taskRole is that of a child that does one task on an export. If the server does not answer
// the child hangs, and is killed.
const taskRole = "export-task"

// A task reads its input, and tells what it finds as it finds it.
type task func(ctx context.Context, input []byte, tell func(any) error) error

var tasks = map[string]task{
	examineTask: examine,
	listTask:    listExport,
	initTask:    initExport,
}

// order is what a child is told.
type order struct {
	Task  string
	Input json.RawMessage
}

// line is what the child writes, one a line: a finding, or what it failed with.
type line struct {
	Found json.RawMessage `json:"found,omitempty"`
	Error string          `json:"error,omitempty"`
}

// runTask is the child.
func runTask(in reexec.Input) error {
	var o order
	if err := in.Decode(&o); err != nil {
		return err
	}
	do := tasks[o.Task]
	if do == nil {
		return fmt.Errorf("unknown task %q", o.Task)
	}
	out := json.NewEncoder(in.Conn)
	err := do(context.Background(), o.Input, func(found any) error {
		b, err := json.Marshal(found)
		if err != nil {
			return err
		}
		return out.Encode(line{Found: b})
	})
	if err != nil {
		return out.Encode(line{Error: err.Error()})
	}
	return nil
}

// inChild has a child do a task, and passes on what it finds. The child is killed when ctx
// ends, and not waited for then.
func inChild[T any](ctx context.Context, name string, input any, found func(T)) error {
	in, err := json.Marshal(input)
	if err != nil {
		return err
	}
	started := time.Now()
	child, err := reexec.Child{Program: reexec.Self, Role: taskRole, Label: []string{name}, Args: order{name, in}, Quiet: true}.Start()
	if err != nil {
		return err
	}
	defer child.Conn.Close() //nolint:errcheck // nothing more is sent
	defer child.Kill()
	if deadline, ok := ctx.Deadline(); ok {
		if err := child.Conn.SetReadDeadline(deadline); err != nil {
			return err
		}
	}
	if err = readLines(child.Conn, found); err == nil {
		select {
		case <-child.Done():
			err = child.Err()
		case <-ctx.Done():
		}
	}
	if ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("gave no answer in %v", time.Since(started).Round(time.Second))
	}
	return err
}

// readLines hands on what a child found; the error is the child's.
func readLines[T any](r io.Reader, found func(T)) error {
	lines := bufio.NewReader(r)
	for {
		b, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var l line
		if err := json.Unmarshal(b, &l); err != nil {
			return err
		}
		if l.Error != "" {
			return errors.New(l.Error)
		}
		var one T
		if err := json.Unmarshal(l.Found, &one); err != nil {
			return err
		}
		found(one)
	}
}
