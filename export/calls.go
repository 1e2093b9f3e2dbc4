package export

import (
	"context"
	"fmt"
	"path"
	"time"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/grpcserver"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// maxCalls is the maximum number of concurrent calls in a worker process, and so of threads
	// that may hang.
	maxCalls = 64
	// overtime is the interval at which the mounts are tested while a call continues after its
	// cancellation. answerTime is the timeout of the test.
	overtime   = time.Minute
	answerTime = 10 * time.Second
)

// log adds the pool, and the volume or name in the request, to the log lines of a call. The driver logs
// the call itself.
func (w *workerProcess) log(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	kind, id := grpcserver.Subject(req)
	log := klog.LoggerWithValues(klog.FromContext(ctx), "pool", w.job.Pool.Name, "method", path.Base(info.FullMethod), kind, id)
	return handler(klog.NewContext(ctx, log), req)
}

// limit bounds the number of concurrent calls, and ends the process if a call still hangs long after
// its cancellation. A call counts until it returns, even if it was cancelled.
func (w *workerProcess) limit(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if err := w.awaitSlot(ctx); err != nil {
		return nil, err
	}
	defer func() { <-w.calls }()
	returned := make(chan struct{})
	defer close(returned)
	defer context.AfterFunc(ctx, func() {
		if hangs(returned, overtime, w.answers) {
			w.abort(path.Base(info.FullMethod))
		}
	})()
	return handler(ctx, req)
}

// awaitSlot waits until fewer than maxCalls calls are running.
func (w *workerProcess) awaitSlot(ctx context.Context) (err error) {
	ctx, span := trace.Start(ctx, "wait for call slot")
	defer span.End(&err)
	select {
	case w.calls <- struct{}{}:
		return nil
	case <-ctx.Done():
		return volume.Errorf(volume.ErrUnavailable, "pool %q: %d calls are running: %w: retry", w.job.Pool.Name, maxCalls, ctx.Err())
	}
}

// hangs waits for a call and calls answers, a test of the mounts, at the interval every. It returns
// false when the call has returned, and true if the mounts do not answer. While the mounts answer, the
// call is only slow (a check of a large filesystem, a flush), and would have to start again if the
// process ended.
func hangs(returned <-chan struct{}, every time.Duration, answers func() bool) bool {
	for {
		select {
		case <-returned:
			return false
		case <-time.After(every):
			if !answers() {
				return true
			}
		}
	}
}

// answers reports whether all mounts from the server answer. An error of a mount is an answer.
func (w *workerProcess) answers() bool {
	at, err := w.mounts()
	if err != nil || len(at) == 0 {
		return false
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for _, path := range at {
			_, _ = mount.Statfs(path)
		}
	}()
	select {
	case <-answered:
		return true
	case <-time.After(answerTime):
		return false
	}
}

// mounts returns the mount points of the pool's base mounts or, for static volumes, those of all mounts
// from the server.
func (w *workerProcess) mounts() ([]string, error) {
	if !w.job.Static {
		return w.bases.own(), nil
	}
	server, err := volume.CanonicalServer(w.job.Pool.NFS.Server)
	if err != nil {
		return nil, err
	}
	entries, err := mount.Of(&mount.NFSSource{NFS: mount.NFS{Server: server, Path: w.job.Pool.NFS.Export}, AnyPath: true})
	var at []string
	for _, e := range entries {
		at = append(at, e.Mountpoint)
	}
	return at, err
}

// abort ends the process, because its calls cannot return.
func (w *workerProcess) abort(method string) {
	select {
	case w.stuck <- fmt.Errorf("%s still hangs long after it was cancelled, and the mounts do not answer although server %s does: the filesystem that the server exports may hang, see the server's log", method, w.job.Pool.NFS.Server):
	default: // another call has ended the process
	}
}
