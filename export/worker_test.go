package export

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/volume"
)

// wantUnavailable checks that an error is ErrUnavailable and contains some texts.
func wantUnavailable(t *testing.T, err error, says ...string) {
	t.Helper()
	if !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("got error %v, want ErrUnavailable", err)
		return
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("got error %q, want %q in it", err, s)
		}
	}
}

// hang is longer than any call takes that does not hang.
const hang = 2 * time.Minute

// answered returns the result of a call. It fails the test if the call hangs.
func answered(t *testing.T, call <-chan error) error {
	t.Helper()
	select {
	case err := <-call:
		return err
	case <-time.After(hang):
		t.Fatalf("no answer within %v", hang)
		return nil
	}
}

// alive reports whether a process exists.
func alive(pid string) bool {
	n, _ := strconv.Atoi(pid)
	return syscall.Kill(n, 0) == nil
}

// threads counts the threads of this process.
func threads(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestCalls: calls reach the pool's worker, and its responses and errors are returned.
func TestCalls(t *testing.T) {
	w := newDriver(t, defaultIntervals, startServer(t), startServer(t))
	first, err := w.get(t.Context(), "nfs:nas0:v")
	if err != nil || first["pool"] != "nas0" || first["silent"] != "false" {
		t.Fatalf("first call: got %v, %v; want pool nas0, whose server is not silent", first, err)
	}
	again, err := w.get(t.Context(), "nfs:nas0:w")
	if err != nil || again["pid"] != first["pid"] {
		t.Errorf("second call: got %v, %v; want the same process as %v", again, err, first)
	}
	other, err := w.get(t.Context(), "loop:nas1:v")
	if err != nil || other["pool"] != "nas1" || other["pid"] == first["pid"] {
		t.Errorf("call for another pool: got %v, %v; want pool nas1 in another process than %v", other, err, first)
	}
	for id, code := range map[string]codes.Code{"nfs:nas0:none": codes.NotFound, "nfs:nas0:busy": codes.Unavailable} {
		if _, err := w.get(t.Context(), id); status.Code(err) != code {
			t.Errorf("%s: got %v, want code %v", id, err, code)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := w.get(ctx, "nfs:nas0:hang"); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("call that hangs: got %v, want DeadlineExceeded", err)
	}
	await(t, "a report", func() bool { r := w.of("nas0").Report; return r != nil && r.Usage.Total == 7 && r.Volumes["nfs"] == 3 })
	if s := w.of("nas0"); s.Starts[startFirst] != 1 || s.Calls != 0 || !s.Answers || !s.Running {
		t.Errorf("got state %+v, want one start, no calls, a server that answers and a running process", s)
	}
}

// TestSilentServer: calls that wait for a silent server fail, and calls for it are refused. Calls for other
// servers are not affected. When the server answers again, its calls succeed.
func TestSilentServer(t *testing.T) {
	for name, tc := range map[string]struct{ stop, resume func(*nfsServer) }{
		"accepts connections": {func(s *nfsServer) { s.setSilent(true) }, func(s *nfsServer) { s.setSilent(false) }},
		"refuses connections": {(*nfsServer).refuse, (*nfsServer).listen},
	} {
		t.Run(name, func(t *testing.T) {
			bad, good := startServer(t), startServer(t)
			w := newDriver(t, testIntervals, bad, good)
			first := w.mustGet(t, "nfs:nas0:v")
			other := w.mustGet(t, "nfs:nas1:v")
			goroutines, before := runtime.NumGoroutine(), threads(t)
			tc.stop(bad)
			var calls []<-chan error
			for range 200 {
				calls = append(calls, w.begin(t.Context(), "nfs:nas0:hang"))
			}
			for _, call := range calls {
				wantUnavailable(t, answered(t, call), `pool "nas0": server 127.0.0.1 has not answered since`)
			}
			await(t, "the end of the process", func() bool { return !alive(first["pid"]) })
			if n := threads(t); n > before+4 { // 200 calls that hang need 200 threads
				t.Errorf("got %d threads, want at most 4 more than the %d before", n, before)
			}
			await(t, "the end of the goroutines of the calls", func() bool { return runtime.NumGoroutine() <= goroutines+80 })
			_, err := w.get(t.Context(), "nfs:nas0:v")
			wantUnavailable(t, err, "has not answered since")
			_, err = w.controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v", Parameters: map[string]string{"pool": "nas0"}})
			wantUnavailable(t, err, "has not answered since")
			if s := w.of("nas0"); !s.Running || s.Answers || s.Starts[startSilent] != 1 {
				t.Errorf("got state %+v, want a process that was started because the server is silent", s)
			}
			if err := w.unstage(t.Context(), "nfs:nas0:v"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "silent since") {
				t.Errorf("unstage: got %v, want the error of a process for a silent server", err)
			}
			health, err := w.controller.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: "nfs:nas0:v"})
			if got := health.GetVolumeHealth().GetHealthStatuses(); err != nil || len(got) != 1 || got[0].GetReason() != "ServerSilent" {
				t.Errorf("health: got %v, %v; want reason ServerSilent", health, err)
			}
			if now, err := w.get(t.Context(), "nfs:nas1:v"); err != nil || now["pid"] != other["pid"] {
				t.Errorf("call for another server: got %v, %v; want the same process as %v", now, err, other)
			}
			tc.resume(bad)
			var now map[string]string
			await(t, "the server to answer", func() bool { now, err = w.get(t.Context(), "nfs:nas0:v"); return err == nil })
			if now["silent"] != "false" || now["pid"] == first["pid"] {
				t.Errorf("after the server answers: got %v, want a new process that is not silent, other than %v", now, first)
			}
			if s := w.of("nas0"); s.Starts[startFirst] != 1 || s.Starts[startSilent] != 1 || s.Starts[startAnswering] != 1 {
				t.Errorf("got state %+v, want one start for each of the three reasons", s)
			}
		})
	}
}

// TestServerRestart: a server that restarts quickly does not count as silent.
func TestServerRestart(t *testing.T) {
	server := startServer(t)
	slow := testIntervals
	slow.silentAfter = 5 * time.Second
	w := newDriver(t, slow, server)
	before := w.mustGet(t, "nfs:nas0:v")
	call := w.begin(t.Context(), "nfs:nas0:hang")
	server.refuse()
	await(t, "a failed ping", func() bool {
		w := w.byName("nas0")
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.pingErr != nil
	})
	server.listen()
	await(t, "an answered ping", func() bool {
		w := w.byName("nas0")
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.unansweredSince.IsZero()
	})
	now, err := w.get(t.Context(), "nfs:nas0:v")
	if err != nil || now["pid"] != before["pid"] {
		t.Errorf("call after the restart: got %v, %v; want the same process as %v", now, err, before)
	}
	select {
	case err := <-call:
		t.Errorf("the call that was running during the restart ended: %v", err)
	default:
	}
}

// TestWorkerEnds: if a process ends, its calls fail with the reason. The next call starts a new process.
func TestWorkerEnds(t *testing.T) {
	w := newDriver(t, defaultIntervals, startServer(t))
	hanging := w.begin(t.Context(), "nfs:nas0:hang")
	await(t, "the call to be running", func() bool { return w.of("nas0").Calls == 1 })
	_, err := w.get(t.Context(), "nfs:nas0:exit")
	wantUnavailable(t, err, "worker process has ended", "exit status 7", "it broke")
	wantUnavailable(t, answered(t, hanging), "worker process has ended")
	await(t, "a new process", func() bool { _, err := w.get(t.Context(), "nfs:nas0:v"); return err == nil })
	if s := w.of("nas0"); s.Starts[startEnded] != 1 {
		t.Errorf("got state %+v, want one start after a process ended", s)
	}
}

// TestBrokenWorker: if the worker process always ends at once, not every call starts a new one.
func TestBrokenWorker(t *testing.T) {
	w := newDriver(t, defaultIntervals, startServer(t))
	w.options.Pools[0].MaxVolumes = brokenPool
	_, err := w.get(t.Context(), "nfs:nas0:v")
	wantUnavailable(t, err, "worker process has ended", "the worker of nas0 is broken")
	for range 100 {
		_, err = w.get(t.Context(), "nfs:nas0:v")
		wantUnavailable(t, err, "the worker of nas0 is broken")
	}
	if n := w.of("nas0").Starts[startEnded]; n > 10 {
		t.Errorf("the process was restarted %d times by 100 calls, want at most 10", n)
	}
}

// immortal makes the processes of a pool that were started while the server answered survive a kill, as if a
// thread waited in the kernel. It returns the functions that really kill these processes.
func (w *testDriver) immortal(t *testing.T, pool string) *[]func() {
	t.Helper()
	var kills []func()
	worker := w.byName(pool)
	launch := worker.launch
	worker.launch = func(job Job) (*process, error) {
		p, err := launch(job)
		if err == nil && job.SilentSince.IsZero() {
			kills = append(kills, p.kill)
			p.kill = func() {}
		}
		return p, err
	}
	t.Cleanup(func() {
		for _, kill := range kills {
			kill()
		}
	})
	return &kills
}

// TestAbandonedAndSilent: a process for a silent server is started even if the number of abandoned processes is
// at its limit, because it makes them end. It is started without a call.
func TestAbandonedAndSilent(t *testing.T) {
	server := startServer(t)
	w := newDriver(t, testIntervals, server)
	kills := w.immortal(t, "nas0")
	for n := range maxAbandoned {
		w.mustGet(t, "nfs:nas0:v")
		server.setSilent(true)
		await(t, "a process for a silent server", func() bool { s := w.of("nas0"); return !s.Answers && s.Running && s.Abandoned == n+1 })
		server.setSilent(false)
		await(t, "the server to answer", func() bool { s := w.of("nas0"); return s.Answers && s.Abandoned == n+1 })
	}
	if _, err := w.get(t.Context(), "nfs:nas0:v"); err == nil {
		t.Error("a process was started although the abandoned ones have not ended")
	}
	server.setSilent(true)
	await(t, "another process for a silent server", func() bool { s := w.of("nas0"); return !s.Answers && s.Running })
	if s := w.of("nas0"); s.Starts[startSilent] != maxAbandoned+1 || len(*kills) != maxAbandoned {
		t.Errorf("got state %+v and %d abandoned processes, want %d starts for a silent server and %d", s, len(*kills), maxAbandoned+1, maxAbandoned)
	}
}

// TestAbandoned: no process is started while maxAbandoned killed processes have not ended.
func TestAbandoned(t *testing.T) {
	server := startServer(t)
	w := newDriver(t, testIntervals, server)
	kills := w.immortal(t, "nas0")
	for range maxAbandoned {
		w.mustGet(t, "nfs:nas0:v")
		call := w.begin(t.Context(), "nfs:nas0:hang")
		await(t, "the call to be running", func() bool { return w.of("nas0").Calls == 1 })
		server.setSilent(true)
		wantUnavailable(t, answered(t, call), "has not answered since")
		server.setSilent(false)
		await(t, "the server to answer", func() bool { s := w.of("nas0"); return s.Answers && s.Abandoned == len(*kills) })
	}
	if s := w.of("nas0"); s.Abandoned != maxAbandoned {
		t.Fatalf("got state %+v, want %d abandoned processes", s, maxAbandoned)
	}
	_, err := w.get(t.Context(), "nfs:nas0:v")
	wantUnavailable(t, err, "2 processes that served it were killed and have not ended")
	(*kills)[0]()
	await(t, "a new process", func() bool { _, err := w.get(t.Context(), "nfs:nas0:v"); return err == nil })
	if s := w.of("nas0"); s.Abandoned != maxAbandoned-1 {
		t.Errorf("got state %+v, want %d abandoned processes", s, maxAbandoned-1)
	}
}

// TestIdleWorker: the worker of a pool that is not configured ends after a time without calls. The worker of a
// configured pool does not.
func TestIdleWorker(t *testing.T) {
	short := testIntervals
	short.idleTime = 100 * time.Millisecond
	w := newDriver(t, short, startServer(t))
	configured := w.mustGet(t, "nfs:nas0:v")
	direct, err := volume.DirectPool("localhost", "/e")
	if err != nil {
		t.Fatal(err)
	}
	idle, err := w.get(t.Context(), "nfs:"+direct+":v")
	if err != nil || idle["pool"] != direct {
		t.Fatalf("got %v, %v; want pool %s", idle, err, direct)
	}
	await(t, "the end of the process", func() bool { return !alive(idle["pid"]) && len(w.States()) == 1 })
	if !alive(configured["pid"]) {
		t.Error("the worker of the configured pool has ended too")
	}
	if again, err := w.get(t.Context(), "nfs:"+direct+":v"); err != nil || again["pid"] == idle["pid"] {
		t.Errorf("next call: got %v, %v; want another process than %v", again, err, idle)
	}
}

// TestStop: the worker processes end with the driver, even during a call.
func TestStop(t *testing.T) {
	w := newDriver(t, defaultIntervals, startServer(t), startServer(t))
	idle := w.mustGet(t, "nfs:nas0:v")
	busy := w.mustGet(t, "nfs:nas1:v")
	call := w.begin(t.Context(), "nfs:nas1:hang")
	await(t, "the call to be running", func() bool { return w.of("nas1").Calls == 1 })
	w.cancel()
	w.Wait()
	if err := answered(t, call); err == nil {
		t.Error("the call succeeded, want an error")
	}
	await(t, "the end of the processes", func() bool { return !alive(idle["pid"]) && !alive(busy["pid"]) })
	_, err := w.get(t.Context(), "nfs:nas0:v")
	wantUnavailable(t, err, "stopping")
}
