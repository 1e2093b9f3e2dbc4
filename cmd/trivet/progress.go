package main

import (
	"fmt"
	"io"
	"sync"
	"time"
	"unicode/utf8"
)

// progressDelay is the time after which a step appears. Shorter steps would only flicker.
const progressDelay = 300 * time.Millisecond

// progressWidth is the maximum number of characters of a progress line. A longer line would wrap, and could not be
// erased.
const progressWidth = 78

// progress shows the current step of a long command in one line of a terminal. It writes nothing to other
// files.
type progress struct {
	w  io.Writer
	mu sync.Mutex
	// step is the current step, or empty.
	step  string
	began time.Time
	shown bool
	stop  chan struct{}
	done  chan struct{}
}

// startProgress shows steps on w if w is a terminal. The caller must call end.
func startProgress(w io.Writer) *progress {
	if !isTerminal(w) {
		return &progress{}
	}
	p := &progress{w: w, stop: make(chan struct{}), done: make(chan struct{})}
	go p.run()
	return p
}

// next begins a step.
func (p *progress) next(step string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.step, p.began = fmt.Sprintf(step, args...), time.Now()
}

// end erases the line.
func (p *progress) end() {
	if p.w != nil {
		close(p.stop)
		<-p.done
	}
}

func (p *progress) run() {
	defer close(p.done)
	tick := time.NewTicker(progressDelay)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			p.show()
		case <-p.stop:
			if p.shown {
				fmt.Fprint(p.w, eraseLine) //nolint:errcheck // the terminal is gone
			}
			return
		}
	}
}

const eraseLine = "\r\x1b[K"

// show writes the current step, and how long it has been running.
func (p *progress) show() {
	p.mu.Lock()
	line := progressLine(p.step, time.Since(p.began))
	p.mu.Unlock()
	if line != "" {
		p.shown = true
		fmt.Fprint(p.w, eraseLine+line) //nolint:errcheck // the terminal is gone
	}
}

// progressLine returns the line of a step that has been running for a time. It is empty at the beginning.
func progressLine(step string, running time.Duration) string {
	if step == "" || running < progressDelay {
		return ""
	}
	suffix := fmt.Sprintf(" … %v", running.Truncate(time.Second))
	step = printable(step)
	if room := progressWidth - utf8.RuneCountInString(suffix); utf8.RuneCountInString(step) > room {
		step = string([]rune(step)[:room])
	}
	return step + suffix
}
