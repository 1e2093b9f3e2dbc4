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
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// exportFlags returns flags that name an export, which need not be in the configuration.
func exportFlags(flags *flag.FlagSet) (server, export *string) {
	server = flags.String("server", "", "`name` or address of an NFS server; with --export, selects an export that need not be in the configuration")
	export = flags.String("export", "", "`path` that the server exports")
	flags.StringVar(export, "share", "", "same as --export")
	return server, export
}

// exportConfig returns the configuration of a pool on the export that the flags name.
func exportConfig(server, export string) (c pool.Config, err error) {
	if server, err = volume.CanonicalServer(server); err != nil {
		return c, fmt.Errorf("--server%w", err)
	}
	if export, err = volume.CanonicalExport(export); err != nil {
		return c, fmt.Errorf("--export%w", err)
	}
	return pool.Config{Name: server + ":" + export, NFS: &pool.NFS{Server: server, Export: export}}, nil
}

// examine is the task that checks an export.
func examine(ctx context.Context, e doctor.Export, report func(any) error) error {
	var failed error
	doctor.ExamineExport(ctx, kinds, e, func(c doctor.Check) { failed = errors.Join(failed, report(c)) })
	return failed
}

// listInput is the input of the task that lists the volumes of a pool.
type listInput struct {
	Config   pool.Config
	StateDir string
	// Devices are the loop devices of the volumes that are staged on this node, by tag.
	Devices map[string]string
}

// listExport is the task that lists the volumes of an nfs pool.
func listExport(ctx context.Context, in listInput, report func(any) error) error {
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
		if err := report(newListed(in.Config.Name, e, in.Devices)); err != nil {
			return err
		}
	}
	return nil
}

// initExport is the task that makes an export a pool.
func initExport(ctx context.Context, c pool.Config, report func(any) error) error {
	top, _, err := export.Mount(ctx, c)
	if err != nil {
		return err
	}
	defer top.Close()
	uuid, err := pool.InitShared(top, c)
	if err != nil {
		return err
	}
	return report(uuid)
}

const poolUsage = `usage: trivet pool init [--config FILE] NAME
       trivet pool init --server SERVER --export PATH

Makes an NFS export a pool, and prints the UUID that the configuration can pin.
The export must be empty. An export that is already a pool is not changed.
`

func runPool(args []string) error {
	if isHelp(args) {
		fmt.Print(poolUsage)
		return errHelp
	}
	if len(args) == 0 || args[0] != "init" {
		return fmt.Errorf("the subcommand must be init\n\n%s", poolUsage)
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

// poolToInit returns the configuration of the pool that the flags or the arguments name.
func poolToInit(path, stateDir, server, export string, names []string) (pool.Config, error) {
	if server != "" || export != "" {
		if len(names) > 0 {
			return pool.Config{}, fmt.Errorf("unexpected argument %q: --server and --export already name the export", names[0])
		}
		return exportConfig(server, export)
	}
	if len(names) != 1 {
		return pool.Config{}, errors.New("give the name of one pool after the flags, or --server and --export")
	}
	config, err := loadConfig(path, filepath.Clean(stateDir))
	if err != nil {
		return pool.Config{}, err
	}
	i := slices.IndexFunc(config.Pools, func(c pool.Config) bool { return c.Name == names[0] })
	switch {
	case i < 0:
		return pool.Config{}, fmt.Errorf("pool %q is not in %s: add it, or give --server and --export", names[0], path)
	case !config.Pools[i].Shared():
		return pool.Config{}, fmt.Errorf("pool %q is not an nfs pool, and init is only for nfs pools: the driver creates other pools when it starts", names[0])
	}
	return config.Pools[i], nil
}

// taskRole is the role of a child process that runs one task on an export, because a process hangs if the
// server does not answer. The child is then killed.
const taskRole = "export-task"

// A task runs in the child with an input. It reports each result as soon as it has it.
type task func(ctx context.Context, input []byte, report func(any) error) error

// The names of the tasks.
const (
	examineTask = "examine"
	listTask    = "list"
	initTask    = "init"
)

var tasks = map[string]task{
	examineTask: decoded(examine),
	listTask:    decoded(listExport),
	initTask:    decoded(initExport),
}

// decoded returns a task that decodes its input and calls do.
func decoded[T any](do func(ctx context.Context, input T, report func(any) error) error) task {
	return func(ctx context.Context, input []byte, report func(any) error) error {
		var in T
		if err := json.Unmarshal(input, &in); err != nil {
			return err
		}
		return do(ctx, in, report)
	}
}

// taskRequest is the input of a child.
type taskRequest struct {
	Task  string
	Input json.RawMessage
}

// line is a line of the child's output: a result, or the error of the task.
type line struct {
	Found json.RawMessage `json:"found,omitempty"`
	Error string          `json:"error,omitempty"`
}

// runTask runs in the child. It runs the requested task, and writes its results and its error as lines.
func runTask(in reexec.Input) error {
	var request taskRequest
	if err := in.Decode(&request); err != nil {
		return err
	}
	do := tasks[request.Task]
	if do == nil {
		return fmt.Errorf("unknown task %q", request.Task)
	}
	out := json.NewEncoder(in.Conn)
	err := do(context.Background(), request.Input, func(result any) error {
		b, err := json.Marshal(result)
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

// inChild runs a task in a child, and calls found with each result. When ctx ends, it kills the child but
// does not wait for its end.
func inChild[T any](ctx context.Context, name string, input any, found func(T)) error {
	in, err := json.Marshal(input)
	if err != nil {
		return err
	}
	started := time.Now()
	child, err := reexec.Child{Program: reexec.Self, Role: taskRole, Label: []string{name}, Args: taskRequest{name, in}, Quiet: true}.Start()
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
		return fmt.Errorf("no answer within %v", time.Since(started).Round(time.Second))
	}
	return err
}

// readLines calls found with each result of a child, and returns the error of the task.
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
