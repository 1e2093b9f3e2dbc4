package sys

import "runtime"

// OnOwnThread runs do on a thread that ends afterwards, so that do can change attributes of the thread.
func OnOwnThread(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		done <- do()
	}()
	return <-done
}
