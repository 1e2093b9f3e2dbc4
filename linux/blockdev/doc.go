// Package blockdev works on block devices and on the images behind them: loop
// devices, what is on a device, making a filesystem, checking it, growing it.
//
// It mounts nothing, keeps no state, and knows neither volumes nor pools.
package blockdev
