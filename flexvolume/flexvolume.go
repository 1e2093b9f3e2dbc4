// Package flexvolume answers the calls of a FlexVolume executable. Each call is a process that
// connects to a CSI driver. If the running driver serves the volume's pool, that is the running
// driver. Otherwise it is the on-demand driver, which the call starts and which ends when idle. A
// volume that is an NFS directory (a directory of an NFS server) has no pool, so the on-demand driver
// always serves it. The state between calls is the mount table and a record for each directory where a
// volume is mounted.
//
// The interface is that of the kubelet: the command line contains the call and its arguments,
// and the answer is one line of JSON on the standard output
// (kubernetes/community, contributors/devel/sig-storage/flexvolume.md).
package flexvolume

import (
	"context"
	"fmt"
	"path/filepath"
	"runtime/debug"
	"strconv"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volume"
)

// Status is the outcome of a call.
type Status string

// The statuses that a kubelet knows. After NotSupported the kubelet performs its default action.
const (
	Success      Status = "Success"
	Failure      Status = "Failure"
	NotSupported Status = "Not supported"
)

// Answer is the output of a call.
type Answer struct {
	Status       Status        `json:"status"`
	Message      string        `json:"message,omitempty"`
	Capabilities *Capabilities `json:"capabilities,omitempty"`
	// NewSize is the size in bytes that a volume has been expanded to.
	NewSize int64 `json:"volumeNewSize,omitempty"`
}

// Capabilities are part of the answer to init. A kubelet assumes true for a missing capability, except
// for supportsMetrics.
type Capabilities struct {
	Attach           bool `json:"attach"`
	SELinuxRelabel   bool `json:"selinuxRelabel"`
	SupportsMetrics  bool `json:"supportsMetrics"`
	FSGroup          bool `json:"fsGroup"`
	RequiresFSResize bool `json:"requiresFSResize"`
}

// StateDirVariable is the environment variable with the path of the state directory.
const StateDirVariable = "TRIVET_FLEXVOLUME_STATE_DIR"

// Executable is the configuration of this program as one FlexVolume executable of a kubelet.
type Executable struct {
	// Kind is the kind of all volumes of the executable. If it is empty, the options of each volume set
	// the kind.
	Kind string
	// DefaultKind is the kind of a node-local volume whose options set no kind. ServerKind is the kind
	// of NFS directories.
	DefaultKind, ServerKind string
	// StateDir is the directory of the staging mounts and the records.
	StateDir string
	// Socket is the path of the running driver's socket.
	Socket string
	// OnDemand is the driver that a call starts if the running driver does not serve the pool.
	OnDemand OnDemand
}

// OnDemand describes a driver that a call starts and that ends when idle.
type OnDemand struct {
	// Command starts the driver, with the state directory as file descriptor 3. If another on-demand
	// driver runs, the new one exits with status 0.
	Command []string
	// Socket is the name of the driver's socket in the state directory.
	Socket string
	// Pools are the names of the pools in the driver's configuration. If it is not empty, calls for
	// other pools are refused.
	Pools []string
}

// call is the implementation of a call, with the number of required arguments.
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
	"assign":       {2, (*Executable).assign}, // for administrators; a kubelet does not make this call
}

// Answer executes a call. It never panics; errors are in the answer.
func (e *Executable) Answer(ctx context.Context, words []string) (a Answer) {
	defer func() {
		if r := recover(); r != nil {
			klog.FromContext(ctx).Error(nil, "Panic", "value", r, "stack", string(debug.Stack()))
			a = Answer{Status: Failure, Message: fmt.Sprintf("panic: %v: this is a bug, please report it", r)}
		}
	}()
	if len(words) == 0 {
		return Answer{Status: Failure, Message: "no call is given: a kubelet runs this program with init, mount, unmount, …"}
	}
	c, known := calls[words[0]]
	if !known {
		return Answer{Status: NotSupported}
	}
	if args := words[1:]; len(args) < c.arguments {
		return Answer{Status: Failure, Message: fmt.Sprintf("%s has %d arguments: %d are required", words[0], len(args), c.arguments)}
	}
	a, err := c.do(e, ctx, words[1:])
	if err != nil {
		return Answer{Status: Failure, Message: err.Error()}
	}
	a.Status = Success
	return a
}

// init returns the capabilities of the executable, and cleans up after killed calls.
func (e *Executable) init(ctx context.Context, _ []string) (Answer, error) {
	if err := e.sweep(ctx); err != nil { // volumes can be used without the clean-up
		klog.FromContext(ctx).Error(err, "Failed to clean up after killed calls; the next call retries")
	}
	isNFS := e.Kind != "" && e.Kind == e.ServerKind
	return Answer{Capabilities: &Capabilities{SELinuxRelabel: !isNFS, FSGroup: !isNFS, RequiresFSResize: !isNFS}}, nil
}

// mount DIR OPTIONS mounts a volume at a directory.
func (e *Executable) mount(ctx context.Context, args []string) (Answer, error) {
	if dir := args[0]; !filepath.IsAbs(dir) || filepath.Clean(dir) != dir {
		return Answer{}, volume.Errorf(volume.ErrInvalid, "directory %q: must be an absolute path without . and ..", dir)
	}
	return Answer{}, e.withVolume(ctx, args[1], func(s *session, o options) error {
		id, err := s.findOrCreate(ctx, o)
		if err != nil {
			return err
		}
		return s.mount(ctx, target{Path: args[0], Volume: id, Pool: o.pool}, o)
	})
}

// assign NAMESPACE OPTIONS gives a volume to a namespace.
func (e *Executable) assign(ctx context.Context, args []string) (Answer, error) {
	namespace := args[0]
	if !volume.ValidNamespace(namespace) {
		return Answer{}, volume.Errorf(volume.ErrInvalid, "namespace %q: must be a name of 1 to 63 of a-z, 0-9 and -", namespace)
	}
	return Answer{}, e.withVolume(ctx, args[1], func(s *session, o options) error { return s.assign(ctx, o, namespace) })
}

// withVolume calls do in a session for the volume that the JSON options in text describe.
func (e *Executable) withVolume(ctx context.Context, text string, do func(s *session, o options) error) error {
	o, err := e.options(ctx, text)
	if err != nil {
		return err
	}
	s, err := e.begin(ctx, target{Volume: o.handle(), Pool: o.pool}, o.pool, lockTime)
	if err != nil {
		return err
	}
	defer s.end()
	return do(s, o)
}

// unmount DIR unmounts a volume from a directory, and unstages it if that was its last mount.
func (e *Executable) unmount(ctx context.Context, args []string) (Answer, error) {
	t, err := e.targetAt(args[0])
	if err != nil {
		return Answer{}, err
	}
	pool := t.Pool
	if !e.served(ctx, pool) {
		pool = "" // the on-demand driver finds the mounts and devices of a volume by its ID
	}
	s, err := e.begin(ctx, t, pool, lockTime)
	if err != nil {
		return Answer{}, err
	}
	defer s.end()
	return Answer{}, s.release(ctx, t)
}

// expandVolume OPTIONS DEVICE SIZE OLD expands the storage of a volume.
func (e *Executable) expandVolume(ctx context.Context, args []string) (Answer, error) {
	size, err := strconv.ParseInt(args[2], 10, 64)
	if err != nil || size <= 0 {
		return Answer{}, volume.Errorf(volume.ErrInvalid, "size %q: must be a number of bytes", args[2])
	}
	err = e.withVolume(ctx, args[0], func(s *session, o options) (err error) {
		size, err = s.expand(ctx, o, size)
		return err
	})
	return Answer{NewSize: size}, err
}

// expandFilesystem OPTIONS DEVICE DIR SIZE OLD expands the filesystem of a mounted volume. If
// the volume is not mounted, the next mount expands it.
func (e *Executable) expandFilesystem(ctx context.Context, args []string) (Answer, error) {
	return Answer{}, e.withVolume(ctx, args[0], func(s *session, o options) error { return s.expandFilesystem(ctx, o) })
}
