// Package flexvolume answers the calls of a FlexVolume executable: each is a process of
// its own, over the services and backends that the driver has. What has to be known
// from one call to the next is the mount table, and a file for each directory that a
// volume is mounted at.
//
// The convention is that of the kubelet: the call and its arguments are the words of the
// command line, the answer is one line of JSON on the standard output
// (kubernetes/community, contributors/devel/sig-storage/flexvolume.md).
package flexvolume

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"strconv"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Status is how a call went.
type Status string

// The statuses that a kubelet knows. To a call that is NotSupported it does itself what
// it takes for usual.
const (
	Success      Status = "Success"
	Failure      Status = "Failure"
	NotSupported Status = "Not supported"
)

// Answer is what a call prints.
type Answer struct {
	Status       Status        `json:"status"`
	Message      string        `json:"message,omitempty"`
	Capabilities *Capabilities `json:"capabilities,omitempty"`
	// NewSize is the size in bytes that a volume has been expanded to.
	NewSize int64 `json:"volumeNewSize,omitempty"`
}

// Capabilities are the answer to init. A kubelet takes those that are missing for true,
// but for supportsMetrics.
type Capabilities struct {
	Attach           bool `json:"attach"`
	SELinuxRelabel   bool `json:"selinuxRelabel"`
	SupportsMetrics  bool `json:"supportsMetrics"`
	FSGroup          bool `json:"fsGroup"`
	RequiresFSResize bool `json:"requiresFSResize"`
}

// Executable is what one directory of a kubelet's volume plugins has.
type Executable struct {
	// Backend is of all its volumes; empty: their options say it.
	Backend string
	// StateDir has the staged volumes, and what is remembered of them.
	StateDir string
	// Pools are those of the configuration, Backends makes the backends on them.
	Pools    []pool.Config
	Backends []func(*pool.Set) backend.Backend
}

// call is one of those that the executable has, with the number of its arguments.
type call struct {
	arguments int
	do        func(e *Executable, ctx context.Context, args []string) (Answer, error)
}

var calls = map[string]call{
	"init":         {0, (*Executable).init},
	"mount":        {2, (*Executable).mount},
	"unmount":      {1, (*Executable).unmount},
	"expandvolume": {4, (*Executable).expandVolume},
	"expandfs":     {5, (*Executable).expandFilesystem},
	"assign":       {2, (*Executable).assign}, // no kubelet makes it
}

// Answer does what a call asks for. It panics never, and fails in the answer.
func (e *Executable) Answer(ctx context.Context, words []string) (a Answer) {
	defer func() {
		if r := recover(); r != nil {
			klog.FromContext(ctx).Error(nil, "Panic", "value", r, "stack", string(debug.Stack()))
			a = Answer{Status: Failure, Message: fmt.Sprintf("this program has a bug: %v", r)}
		}
	}()
	if len(words) == 0 {
		return Answer{Status: Failure, Message: "no call is named: it is for a kubelet to run, with init, mount, unmount, …"}
	}
	c, known := calls[words[0]]
	if !known {
		return Answer{Status: NotSupported}
	}
	if args := words[1:]; len(args) < c.arguments {
		return Answer{Status: Failure, Message: fmt.Sprintf("%s has %d arguments: want %d", words[0], len(args), c.arguments)}
	}
	a, err := c.do(e, ctx, words[1:])
	if err != nil {
		return Answer{Status: Failure, Message: err.Error()}
	}
	a.Status = Success
	return a
}

// init also takes down what calls that were killed have left.
func (e *Executable) init(ctx context.Context, _ []string) (Answer, error) {
	if err := e.sweep(ctx); err != nil { // which keeps nobody from using volumes
		klog.FromContext(ctx).Error(err, "Clearing what killed calls left failed; it is tried again")
	}
	onServer := e.Backend == volume.BackendNFS
	return Answer{Capabilities: &Capabilities{SELinuxRelabel: !onServer, FSGroup: !onServer, RequiresFSResize: !onServer}}, nil
}

// mount DIR OPTIONS shows a volume at a directory.
func (e *Executable) mount(ctx context.Context, args []string) (Answer, error) {
	if dir := args[0]; !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
		return Answer{}, volume.Errorf(volume.ErrInvalid, "directory %q: want an absolute path without . and ..", dir)
	}
	return Answer{}, e.withVolume(ctx, args[1], func(s *turn, o options) error {
		id, err := s.volume(ctx, o)
		if err != nil {
			return err
		}
		return s.mount(ctx, target{Path: args[0], Volume: id, Pool: o.pool}, o)
	})
}

// assign NAMESPACE OPTIONS gives a volume to a namespace. It is an administrator's call.
func (e *Executable) assign(ctx context.Context, args []string) (Answer, error) {
	namespace := args[0]
	if !volume.ValidNamespace(namespace) {
		return Answer{}, volume.Errorf(volume.ErrInvalid, "namespace %q: want a name of 1 to 63 of a-z, 0-9 and -", namespace)
	}
	return Answer{}, e.withVolume(ctx, args[1], func(s *turn, o options) error { return s.assign(ctx, o, namespace) })
}

// withVolume does something with the volume that options in JSON describe, when it is the
// call's turn.
func (e *Executable) withVolume(ctx context.Context, text string, do func(s *turn, o options) error) error {
	o, err := e.options(text)
	if err != nil {
		return err
	}
	s, err := e.begin(ctx, o.lock(), patience)
	if err != nil {
		return err
	}
	defer s.end()
	return do(s, o)
}

// unmount DIR takes a volume away from a directory, and from the machine if it was the
// last.
func (e *Executable) unmount(ctx context.Context, args []string) (Answer, error) {
	t, err := e.recorded(args[0])
	if err != nil {
		return Answer{}, err
	}
	s, err := e.begin(ctx, t.lock(), patience)
	if err != nil {
		return Answer{}, err
	}
	defer s.end()
	return Answer{}, s.release(ctx, t)
}

// expandVolume OPTIONS DEVICE SIZE OLD makes what is behind a volume as large.
func (e *Executable) expandVolume(ctx context.Context, args []string) (Answer, error) {
	size, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil || size <= 0 {
		return Answer{}, volume.Errorf(volume.ErrInvalid, "size %q: want a number of bytes", args[2])
	}
	err = e.withVolume(ctx, args[0], func(s *turn, o options) (err error) {
		size, err = s.expand(ctx, o, size)
		return err
	})
	return Answer{NewSize: size}, err
}

// expandFilesystem OPTIONS DEVICE DIR SIZE OLD lets the filesystem of a mounted volume
// follow. One that is not mounted follows when it is.
func (e *Executable) expandFilesystem(ctx context.Context, args []string) (Answer, error) {
	return Answer{}, e.withVolume(ctx, args[0], func(s *turn, o options) error { return s.follow(ctx, o) })
}
