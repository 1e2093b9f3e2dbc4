package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/pool"
)

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
