// After the source: how its kernels are launched.
static void (*body)();
static void** places;  // of its arguments
static int alive;
static void thread() {
    threadIdx = {now, 0, 0};
    body();
    progress++;
    fibres[now].met = fibres[now].met_warp = 1L << 60;
    alive--;
    for (;;) swapcontext(&fibres[now].context, &home);
}
template <class... Arguments> static void call(void (*kernel)(Arguments...)) {
    [&]<size_t... I>(std::index_sequence<I...>) {
        kernel(*(Arguments*)places[I]...);
    }(std::index_sequence_for<Arguments...>());
}
// The thread blocks one after the other; false if one wrote behind its shared memory or left copies on their way.
static bool launch(void (*kernel)(), Index grid, int threads, int shared, void** arguments) {
    body = kernel, places = arguments, gridDim = grid;
    fibres.resize(threads);
    bool fine = shared <= (int)sizeof shared_memory;
    for (int i = 0; i < grid.x * grid.y * grid.z; i++) {
        blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y}, alive = threads;
        memset(shared_memory, 0xff, sizeof shared_memory);
        for (Fibre& fibre : fibres) {
            fibre.stack.resize(1 << 16), fibre.copies.clear(), fibre.met = fibre.met_warp = fibre.group = 0;
            getcontext(&fibre.context);
            fibre.context.uc_stack.ss_sp = fibre.stack.data(), fibre.context.uc_stack.ss_size = fibre.stack.size();
            makecontext(&fibre.context, thread, 0);
        }
        while (alive)  // a warp goes as far as it can, the first or the last of them first
            for (int k = 0, warps = threads / 32; k < warps; k++) {
                const int first = (i % 2 ? warps - 1 - k : k) * 32;
                for (long before = -1; before != progress;) {
                    before = progress;
                    for (now = first; now < first + 32; now++) swapcontext(&home, &fibres[now].context);
                }
            }
        for (const Fibre& fibre : fibres) fine &= fibre.copies.empty();
        for (int at = shared; at < (int)sizeof shared_memory; at++) fine &= shared_memory[at] == -1;
    }
    return fine;
}
#define KERNEL(name) \
    extern "C" bool launch_##name(int x, int y, int z, int threads, int shared, void** arguments) { \
        return launch([] { call(name); }, {x, y, z}, threads, shared, arguments); \
    }
