package background

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// newTask returns the budget of a new task on disks.
func newTask(rate int64, disks ...*disk) *Budget {
	b := &Budget{rate: rate}
	for _, d := range disks {
		b.shares = append(b.shares, share{disk: d})
	}
	return b
}

// busyDisk returns the budget of a disk that others always use.
func busyDisk() *disk { return &disk{requests: func() (uint64, uint64, bool) { return 0, 0, false }} }

// taking returns a piece that takes some time, and has a number of bytes.
func taking(d time.Duration, bytes int64) func() (int64, error) {
	return func() (int64, error) {
		time.Sleep(d)
		return bytes, nil
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestPace: one task alone has the whole budget: the rate, or half of the time if its pieces take longer than the rate allows.
func TestPace(t *testing.T) {
	for name, row := range map[string]struct {
		took  time.Duration
		bytes int64
		want  time.Duration // of 101 pieces, until the last one ends
	}{
		"rate":         {time.Millisecond, Piece, 100*10*time.Millisecond + time.Millisecond},
		"half":         {20 * time.Millisecond, Piece, 201 * 20 * time.Millisecond},
		"no bytes":     {3 * time.Millisecond, 0, 201 * 3 * time.Millisecond},
		"short pieces": {100 * time.Microsecond, 0, 201 * 100 * time.Microsecond}, // 5 rests of 2 ms
		"a long piece": {10 * time.Second, 0, 201 * 10 * time.Second},
		"much at once": {time.Millisecond, 1000 * Piece, 100*10*time.Second + time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, began := newTask(100*Piece, busyDisk()), time.Now()
				for range 101 {
					must(t, b.Do(t.Context(), taking(row.took, row.bytes)))
				}
				if got := time.Since(began); got < row.want || got > row.want+row.want/1000 {
					t.Errorf("got %v, want %v", got, row.want)
				}
			})
		})
	}
}

// use runs pieces of a task until ctx ends, and returns the time for which they ran.
func use(ctx context.Context, b *Budget, took time.Duration) (sum time.Duration) {
	for b.Do(ctx, taking(took, 0)) == nil {
		sum += took
	}
	return sum
}

// TestFairness: tasks with pieces of different cost use the disk for about the same time, also one that begins later.
func TestFairness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := busyDisk()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var tasks sync.WaitGroup
		got := make([]time.Duration, 3)
		for i, took := range []time.Duration{100 * time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond} {
			tasks.Go(func() {
				if i == 2 {
					time.Sleep(30 * time.Second)
				}
				got[i] = use(ctx, newTask(Piece, d), took)
			})
		}
		tasks.Wait()
		t.Log(got)
		// The disk is used for 30 s: 15 s by two tasks, and then 15 s by three.
		for i, want := range []time.Duration{12500 * time.Millisecond, 12500 * time.Millisecond, 5 * time.Second} {
			if got[i] < want*8/10 || got[i] > want*12/10 {
				t.Errorf("task %d: got %v, want about %v", i, got[i], want)
			}
		}
	})
}

// TestQuietFairness: on a disk that no one else uses, too, tasks with pieces of different cost use it for about the same time.
func TestQuietFairness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &disk{requests: func() (uint64, uint64, bool) { return 0, 0, true }}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var tasks sync.WaitGroup
		got := make([]time.Duration, 2)
		for i, took := range []time.Duration{2 * time.Millisecond, 300 * time.Microsecond} {
			tasks.Go(func() { got[i] = use(ctx, newTask(Piece, d), took) })
		}
		tasks.Wait()
		for i, use := range got {
			if use < 20*time.Second {
				t.Errorf("task %d: got %v of a minute, want about the half", i, use)
			}
		}
	})
}

// TestDifferentDisks: a task on two disks, of which one has been used for hours and the other has not, has its part of both beside the
// other tasks on them, and these have theirs. While it waits for one disk, a task on the other disk has its turns.
func TestDifferentDisks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		long, short := busyDisk(), busyDisk()
		must(t, newTask(Piece, long).Do(t.Context(), taking(10*time.Hour, 0)))
		first := newTask(Piece, long)
		must(t, first.Do(t.Context(), taking(5*time.Hour, 0)))
		time.Sleep(5 * time.Hour)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var tasks sync.WaitGroup
		got := make([]time.Duration, 4)
		for i, b := range []*Budget{newTask(Piece, long, short), newTask(Piece, short), newTask(Piece, short), first} {
			tasks.Go(func() { got[i] = use(ctx, b, 5*time.Millisecond) })
		}
		tasks.Wait()
		t.Log(got)
		// Each disk is used for 30 s, but for moments in which it waits for the other one.
		for i, want := range []time.Duration{10 * time.Second, 10 * time.Second, 10 * time.Second, 15 * time.Second} {
			if got[i] < want*7/10 || got[i] > want*14/10 {
				t.Errorf("task %d: got %v, want about %v", i, got[i], want)
			}
		}
	})
}

// TestLongWait: a task that waits for a piece on one of its disks does not keep the other one from other tasks.
func TestLongWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := busyDisk(), busyDisk()
		ctx, cancel := context.WithCancel(t.Context())
		var tasks sync.WaitGroup
		tasks.Go(func() { must(t, newTask(Piece, b).Do(t.Context(), taking(time.Hour, 0))) })
		synctest.Wait()
		tasks.Go(func() { _ = newTask(Piece, a, b).Do(ctx, taking(0, 0)) })
		synctest.Wait()
		other, began := newTask(Piece, a), time.Now()
		for range 10 {
			must(t, other.Do(t.Context(), taking(time.Millisecond, 0)))
		}
		if got := time.Since(began); got < 18*time.Millisecond || got > 19*time.Millisecond {
			t.Errorf("10 pieces of another task took %v, want at most 19 ms with the rests", got)
		}
		cancel()
		tasks.Wait()
	})
}

// TestReservation: a task on two disks makes progress although pieces of other tasks run on the disks without a moment in which both
// are free. Tasks that wait for a disk on which a piece does not end do not keep their other disk from another task.
func TestReservation(t *testing.T) {
	const piece = 500 * time.Millisecond
	quiet := func() *disk { return &disk{requests: func() (uint64, uint64, bool) { return 0, 0, true }} }
	synctest.Test(t, func(t *testing.T) {
		a, b := quiet(), quiet()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		var tasks sync.WaitGroup
		tasks.Go(func() { use(ctx, newTask(Piece, a), piece) })
		tasks.Go(func() {
			time.Sleep(piece / 2)
			use(ctx, newTask(Piece, b), piece)
		})
		time.Sleep(time.Minute)
		both, began := newTask(Piece, a, b), time.Now()
		for range 10 {
			must(t, both.Do(ctx, taking(time.Millisecond, 0)))
		}
		if got := time.Since(began); got > 20*piece {
			t.Errorf("10 pieces took %v, want at most two pieces of others for each", got)
		}
		cancel()
		tasks.Wait()
	})
	synctest.Test(t, func(t *testing.T) {
		a, hung := quiet(), quiet()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var tasks sync.WaitGroup
		tasks.Go(func() { must(t, newTask(Piece, hung).Do(t.Context(), taking(time.Hour, 0))) })
		synctest.Wait()
		for range 8 {
			tasks.Go(func() { _ = newTask(Piece, a, hung).Do(ctx, taking(0, 0)) })
		}
		time.Sleep(patience / 2)
		if got, want := use(ctx, newTask(Piece, a), piece), time.Minute-longPiece; got < want*8/10 {
			t.Errorf("another task used the disk for %v, want about %v", got, want)
		}
		tasks.Wait()
	})
}

// TestLongPiece: a task with long pieces does not keep another task waiting while it rests.
func TestLongPiece(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := busyDisk()
		must(t, newTask(Piece, d).Do(t.Context(), taking(time.Minute, 0)))
		began := time.Now()
		must(t, newTask(Piece, d).Do(t.Context(), taking(0, 0)))
		if got := time.Since(began); got != maxRest {
			t.Errorf("got %v, want %v", got, maxRest)
		}
	})
}

// TestCancel: a task whose context ends returns at once, wherever it waits, and the next task has the turn.
func TestCancel(t *testing.T) {
	busy := func(d *disk) { _ = newTask(1, d).Do(context.Background(), taking(time.Second, 0)) }
	for name, prepare := range map[string]func(t *testing.T, d *disk, b *Budget){
		"for its own rest":    func(t *testing.T, _ *disk, b *Budget) { must(t, b.Do(t.Context(), taking(time.Second, 0))) },
		"for the disk's rest": func(_ *testing.T, d *disk, _ *Budget) { busy(d) },
		"for another task":    func(_ *testing.T, d *disk, _ *Budget) { go busy(d) },
		"for its second disk": func(_ *testing.T, _ *disk, b *Budget) { go busy(b.shares[1].disk) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d, second := busyDisk(), busyDisk()
				b := newTask(1, d, second)
				prepare(t, d, b)
				synctest.Wait()
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				began := time.Now()
				err := b.Do(ctx, func() (int64, error) { return 0, errors.New("the piece ran") })
				if !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != 100*time.Millisecond {
					t.Errorf("got %v after %v, want the end of the context after 100 ms", err, time.Since(began))
				}
				must(t, newTask(1, d, second).Do(t.Context(), taking(0, 0)))
				if got := time.Since(began); got > 2*time.Second {
					t.Errorf("the next task had its turn after %v, want it after the piece and the rest of a second each", got)
				}
				synctest.Wait()
			})
		})
	}
	if err := (*Budget)(nil).Do(ended(t), taking(0, 0)); !errors.Is(err, context.Canceled) {
		t.Errorf("without a budget: got %v, want context.Canceled", err)
	}
}

func ended(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// TestSeveralDisks: tasks on disks that overlap all make progress, and no two are on a disk at the same time.
func TestSeveralDisks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, c := busyDisk(), busyDisk(), busyDisk()
		var busy sync.Map
		var tasks sync.WaitGroup
		for _, disks := range [][]*disk{{a, b}, {b, c}, {a, c}, {a}, {b}, {c}, {a, b, c}} {
			tasks.Go(func() {
				b := newTask(Piece, disks...)
				for range 100 {
					must(t, b.Do(t.Context(), func() (int64, error) {
						for _, d := range disks {
							if _, taken := busy.LoadOrStore(d, true); taken {
								t.Error("two tasks use a disk at the same time")
							}
						}
						time.Sleep(time.Millisecond)
						for _, d := range disks {
							busy.Delete(d)
						}
						return 0, nil
					}))
				}
			})
		}
		tasks.Wait()
	})
}

// TestPanic: a piece that panics does not keep the turn.
func TestPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTask(Piece, busyDisk())
		func() {
			defer func() { _ = recover() }()
			_ = b.Do(t.Context(), func() (int64, error) { panic("piece") })
		}()
		must(t, b.Do(t.Context(), taking(0, 0)))
	})
}

// TestQuiet: while no one else uses the disk, a task continues without a rest and with larger pieces, except to detect others. If others
// use the disk, it keeps to the rate.
func TestQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var requests atomic.Uint64
		d := &disk{requests: func() (uint64, uint64, bool) { return requests.Load(), 0, true }}
		b := newTask(100*Piece, d) // with 1 ms for a piece, it rests for 9 ms
		if size := b.PieceSize(); size != Piece {
			t.Errorf("at first, a piece has %d bytes, want %d", size, Piece)
		}
		pieces := func(long time.Duration) (n int) {
			for end := time.Now().Add(long); time.Now().Before(end); n++ {
				must(t, b.Do(t.Context(), func() (int64, error) {
					requests.Add(3)
					return taking(time.Millisecond, Piece)()
				}))
			}
			return n
		}
		between := func(what string, n, low, high int) {
			t.Helper()
			if n < low || n > high {
				t.Errorf("%s: got %d pieces, want %d to %d", what, n, low, high)
			}
		}
		pieces(time.Second)
		between("without others", pieces(10*time.Second), 8900, 9200)
		if size := b.PieceSize(); size != quietPiece {
			t.Errorf("without others, a piece has %d bytes, want %d", size, quietPiece)
		}
		ctx, stop := context.WithCancel(t.Context())
		go func() {
			for ctx.Err() == nil {
				time.Sleep(3 * time.Millisecond)
				requests.Add(1)
			}
		}()
		pieces(time.Second)
		between("beside others", pieces(10*time.Second), 850, 990) // about 10 ms of rest for the requests
		if size := b.PieceSize(); size != Piece {
			t.Errorf("beside others, a piece has %d bytes, want %d", size, Piece)
		}
		stop()
		pieces(2 * time.Second)
		between("without others again", pieces(10*time.Second), 8900, 9200)
	})
}

// TestOthers: the more others use the disk, the smaller is the part of the time that a task has, but it makes progress.
func TestOthers(t *testing.T) {
	const rate = 500 * Piece // 2 ms for a piece, and at most 32 ms for the requests of others
	for name, row := range map[string]struct {
		interval time.Duration // between the requests of others
		took     time.Duration // by a piece
		bytes    int64
		want     time.Duration // for a piece with its rest
	}{
		"rare requests":                  {100 * time.Millisecond, time.Millisecond, Piece, 1100 * time.Microsecond},
		"few requests":                   {12 * time.Millisecond, time.Millisecond, Piece, 3500 * time.Microsecond},
		"one in ten pieces":              {10 * time.Millisecond, time.Millisecond, Piece, 4 * time.Millisecond},
		"one in each piece":              {time.Millisecond, time.Millisecond, Piece, 31 * time.Millisecond},
		"ten in each piece":              {100 * time.Microsecond, time.Millisecond, Piece, 31 * time.Millisecond},
		"a slow disk":                    {100 * time.Microsecond, 10 * time.Millisecond, Piece, 32 * time.Millisecond},
		"a disk too slow for the rate":   {100 * time.Microsecond, 50 * time.Millisecond, Piece, 100 * time.Millisecond},
		"a task that reads nothing":      {100 * time.Microsecond, time.Millisecond, 0, 2 * time.Millisecond},
		"a piece with much more content": {100 * time.Microsecond, time.Millisecond, 1000 * Piece, 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				b := newTask(rate, &disk{requests: func() (uint64, uint64, bool) { return uint64(time.Since(began) / row.interval), 0, true }})
				pieces := func(n int) (took time.Duration) {
					began := time.Now()
					for range n {
						must(t, b.Do(t.Context(), taking(row.took, row.bytes)))
					}
					return time.Since(began) / time.Duration(n)
				}
				pieces(2000)
				if got := pieces(2000); got < row.want*9/10 || got > row.want*11/10 {
					t.Errorf("got %v for a piece with its rest, want about %v", got, row.want)
				}
			})
		})
	}
}

// TestSigns: a disk is quiet although the kernel writes a journal for the task, and is not if a request of others does not end.
func TestSigns(t *testing.T) {
	for name, row := range map[string]struct {
		requests func(after time.Duration) (completed, inFlight uint64)
		quiet    bool
	}{
		"a journal": {func(after time.Duration) (uint64, uint64) { return 8 * uint64(after/(500*time.Millisecond)), 0 }, true},
		"a request": {func(time.Duration) (uint64, uint64) { return 1000, 1 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				b := newTask(1<<40, &disk{requests: func() (uint64, uint64, bool) {
					completed, inFlight := row.requests(time.Since(began))
					return completed, inFlight, true
				}})
				for time.Since(began) < 10*time.Second {
					must(t, b.Do(t.Context(), taking(time.Millisecond, Piece)))
					if quiet := b.PieceSize() == quietPiece; time.Since(began) > time.Second && quiet != row.quiet {
						t.Fatalf("after %v: got quiet %v, want %v", time.Since(began), quiet, row.quiet)
					}
				}
			})
		})
	}
}

// TestCounter: a task does not rest longer because the number of requests decreases, is not known for some time, or because others used
// the disk earlier.
func TestCounter(t *testing.T) {
	for name, requests := range map[string]func(after time.Duration) (uint64, bool){
		"decreases": func(after time.Duration) (uint64, bool) { return 1000 - uint64(after/time.Second)%2, true },
		"begins again": func(after time.Duration) (uint64, bool) {
			return max(1000, uint64(after)) % uint64(3*time.Second), after < 0
		},
		"is unknown":       func(after time.Duration) (uint64, bool) { return uint64(after), after < 3*time.Second },
		"is unknown first": func(after time.Duration) (uint64, bool) { return 1 << 40, after > 3*time.Second },
		"stops":            func(after time.Duration) (uint64, bool) { return uint64(min(after, 3*time.Second)), true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				b := newTask(1<<40, &disk{requests: func() (n, _ uint64, ok bool) {
					n, ok = requests(time.Since(began))
					return n, 0, ok
				}})
				for time.Since(began) < 10*time.Second {
					piece := time.Now()
					must(t, b.Do(t.Context(), taking(time.Millisecond, Piece)))
					if took := time.Since(piece); time.Since(began) > 5*time.Second && took > listenTime+time.Millisecond {
						t.Fatalf("a piece with its rest took %v", took)
					}
				}
			})
		})
	}
}

// TestListen: on a disk that no one else uses, each rest has the length in which others are detected, also after pieces that are due to
// rest for less.
func TestListen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTask(1<<40, &disk{requests: func() (uint64, uint64, bool) { return 0, 0, true }})
		rests := map[time.Duration]int{}
		for began := time.Now(); time.Since(began) < 10*time.Second; {
			before := time.Now()
			must(t, b.Do(t.Context(), taking(100*time.Microsecond, 0)))
			rests[time.Since(before)-100*time.Microsecond]++
		}
		if n := rests[listenTime]; len(rests) != 3 || rests[minRest] > 40 || n < 170 || n > 190 { // the others are 0
			t.Errorf("got rests %v, want about 180 of %v after the first ones", rests, listenTime)
		}
	})
}
